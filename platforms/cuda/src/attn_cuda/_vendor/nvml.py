"""NVML, the driver's management library, through ctypes: it starts no CUDA runtime.

Each reading initialises NVML, asks and shuts it down, so that nothing is held across a fork.
Functions and structures are those of nvml.h.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, ParamSpec, Protocol, TypeVar

from attn_cuda.gpus import DriverReading, Gpu

__all__ = ["DriverUnavailableError", "NvmlError", "NvmlLibrary", "load_library", "read_driver"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S", bound=ctypes.Structure)

_LIBRARY_NAME = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"

_SUCCESS = 0
_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_NOT_FOUND = 6
_FUNCTION_NOT_FOUND = 13
_MIG_ENABLED = 1
# A fact that a GPU or an older driver does not have, as opposed to a GPU that cannot be asked.
_FACT_MISSING = frozenset({_NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND, _FUNCTION_NOT_FOUND})

_REMEDIES = MappingProxyType(
    {
        _NO_PERMISSION: "let this user open /dev/nvidia*",
        9: "load the kernel module (modprobe nvidia) or install the NVIDIA driver anew",
        12: "install the NVIDIA driver anew",
        18: "the kernel still runs the former driver: reboot, or reload the module nvidia",
    }
)

# CUDA cores in a multiprocessor, from the table of arithmetic throughput in NVIDIA's CUDA
# programming guide: NVML counts cores only.
_CORES_PER_MULTIPROCESSOR = MappingProxyType(
    {
        **dict.fromkeys([(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)], 64),
        **dict.fromkeys([(5, 0), (5, 2), (5, 3), (6, 1), (6, 2), (8, 6), (8, 7), (8, 9)], 128),
        **dict.fromkeys([(9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)], 128),
    }
)


class NvmlLibrary(Protocol):
    """A loaded library, or what stands for one in a test: C functions that return a status."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a C function."""


class DriverUnavailableError(RuntimeError):
    """No driver answers; the text says why and what to do."""


class NvmlError(RuntimeError):
    """A call of NVML failed."""

    def __init__(self, function: str, status: int, words: str) -> None:
        super().__init__(f"{function}: {words} (NVML status {status})")
        self.status = status
        self.words = words


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _PciInfo(ctypes.Structure):
    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "id", "subsystem_id")),
        ("bus_id", ctypes.c_char * 32),
    ]


class _MigAttributes(ctypes.Structure):
    _fields_ = [
        ("multiprocessor_count", ctypes.c_uint),
        *((f"engines_{number}", ctypes.c_uint) for number in range(7)),
        ("memory_mib", ctypes.c_ulonglong),
    ]


def load_library() -> NvmlLibrary:
    """Load NVML.

    Raises:
        DriverUnavailableError: it is not there.
    """
    try:
        library: NvmlLibrary = ctypes.CDLL(_LIBRARY_NAME)
    except OSError as error:
        raise DriverUnavailableError(
            f"no NVIDIA driver: its library NVML cannot be loaded ({error}); install the driver, "
            "and in a container give it the capability utility (NVIDIA_DRIVER_CAPABILITIES)"
        ) from error
    return library


def read_driver(library: NvmlLibrary | None = None) -> DriverReading:
    """Ask NVML for its version and all GPUs.

    Raises:
        DriverUnavailableError: NVML cannot be loaded, or does not start.
    """
    nvml = _Nvml(library or load_library())
    try:
        nvml.call("nvmlInit_v2")
    except NvmlError as error:
        remedy = _REMEDIES.get(error.status, "nvidia-smi may say more")
        raise DriverUnavailableError(
            f"the NVIDIA driver does not answer: {error}; {remedy}"
        ) from error
    try:
        return _read(nvml)
    finally:
        nvml.call("nvmlShutdown")


class _Nvml:
    """Calls that raise where the C function returns a status."""

    def __init__(self, library: NvmlLibrary) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            NvmlError: it failed, or this driver does not have it.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NvmlError(name, _FUNCTION_NOT_FOUND, "not in this driver") from None
        status = function(*arguments)
        if status != _SUCCESS:
            raise NvmlError(name, status, self._words(status))

    def _words(self, status: int) -> str:
        describe = self._library.nvmlErrorString
        describe.restype = ctypes.c_char_p  # type: ignore[attr-defined]
        return str((describe(status) or b"unknown error").decode(errors="replace"))

    def text(self, name: str, *arguments: Any) -> str:
        """Call a function that fills a buffer with text."""
        buffer = ctypes.create_string_buffer(256)
        self.call(name, *arguments, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode(errors="replace")

    def number(self, name: str, *arguments: Any) -> int:
        """Call a function that writes one unsigned number."""
        value = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(value))
        return value.value

    def numbers(self, name: str, *arguments: Any) -> tuple[int, int]:
        """Call a function that writes two numbers."""
        first, second = ctypes.c_uint(), ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(first), ctypes.byref(second))
        return first.value, second.value

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Call a function that writes one handle."""
        handle = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(handle))
        return handle

    def structure(self, name: str, handle: ctypes.c_void_p, empty: _S) -> _S:
        """Call a function that fills a structure, and return that."""
        self.call(name, handle, ctypes.byref(empty))
        return empty


def _read(nvml: _Nvml) -> DriverReading:
    gpus: list[Gpu] = []
    problems: list[str] = []
    for index in range(nvml.number("nvmlDeviceGetCount_v2")):
        try:
            gpus.append(_read_gpu(nvml, index))
        except NvmlError as error:  # a GPU that fell off the bus does not hide the others
            problems.append(f"GPU {index}: {error}")
    cuda = _optional(nvml.number, "nvmlSystemGetCudaDriverVersion_v2")
    return DriverReading(
        source="NVML",
        driver_version=nvml.text("nvmlSystemGetDriverVersion"),
        cuda_version=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.pci_bus_id)),
        problems=tuple(problems),
    )


def _read_gpu(nvml: _Nvml, index: int) -> Gpu:
    handle = nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
    capability = nvml.numbers("nvmlDeviceGetCudaComputeCapability", handle)
    pci = nvml.structure("nvmlDeviceGetPciInfo_v3", handle, _PciInfo())
    bus_id = bytes(pci.bus_id).decode(errors="replace")
    memory = _optional(nvml.structure, "nvmlDeviceGetMemoryInfo", handle, _Memory())
    mig_mode = _optional(nvml.numbers, "nvmlDeviceGetMigMode", handle)
    is_mig_enabled = mig_mode is not None and mig_mode[0] == _MIG_ENABLED
    return Gpu(
        uuid=nvml.text("nvmlDeviceGetUUID", handle),
        name=nvml.text("nvmlDeviceGetName", handle),
        capability=capability,
        memory_bytes=int(memory.total) if memory is not None else None,
        compute_units=_multiprocessors(nvml, handle, capability),
        pci_bus_id=bus_id,
        mig_devices=tuple(_mig_devices(nvml, handle, capability, bus_id)) if is_mig_enabled else (),
        is_mig_enabled=is_mig_enabled,
    )


def _multiprocessors(
    nvml: _Nvml, handle: ctypes.c_void_p, capability: tuple[int, int]
) -> int | None:
    cores = _optional(nvml.number, "nvmlDeviceGetNumGpuCores", handle)
    per_multiprocessor = _CORES_PER_MULTIPROCESSOR.get(capability)
    return cores // per_multiprocessor if cores and per_multiprocessor else None


def _mig_devices(
    nvml: _Nvml, parent: ctypes.c_void_p, capability: tuple[int, int], bus_id: str
) -> Iterator[Gpu]:
    name = "nvmlDeviceGetMigDeviceHandleByIndex"
    for slot in range(nvml.number("nvmlDeviceGetMaxMigDeviceCount", parent)):
        handle = _optional(nvml.handle, name, parent, ctypes.c_uint(slot))
        if handle is not None:
            yield _read_mig(nvml, handle, capability, bus_id)


def _read_mig(
    nvml: _Nvml, handle: ctypes.c_void_p, capability: tuple[int, int], bus_id: str
) -> Gpu:
    attributes = nvml.structure("nvmlDeviceGetAttributes_v2", handle, _MigAttributes())
    return Gpu(
        uuid=nvml.text("nvmlDeviceGetUUID", handle),
        name=nvml.text("nvmlDeviceGetName", handle),
        capability=capability,
        memory_bytes=int(attributes.memory_mib) * 2**20,
        compute_units=int(attributes.multiprocessor_count),
        pci_bus_id=bus_id,
        gpu_instance=nvml.number("nvmlDeviceGetGpuInstanceId", handle),
        compute_instance=nvml.number("nvmlDeviceGetComputeInstanceId", handle),
    )


def _optional(ask: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
    """Return a fact, or None where this GPU or driver does not have it."""
    try:
        return ask(*args, **kwargs)
    except NvmlError as error:
        if error.status in _FACT_MISSING:
            return None
        raise
