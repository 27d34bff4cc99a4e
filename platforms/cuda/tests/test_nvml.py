"""The wrapper of NVML, driven through a stand-in for the C library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from attn_cuda._vendor.nvml import DriverUnavailableError, NvmlError, load_library, read_driver

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, GPU_IS_LOST = 3, 4, 6, 15


@dataclass
class FakeGpu:
    """One GPU of the stand-in; `statuses` makes single functions fail."""

    uuid: str = "GPU-11111111-0000-0000-0000-000000000000"
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: int = 150_754_820_096
    cores: int = 16_896
    bus_id: str = "00000000:18:00.0"
    mig: int = 0
    slices: Sequence[FakeSlice | None] = ()
    statuses: dict[str, int] = field(default_factory=dict)


@dataclass
class FakeSlice:
    """One MIG device."""

    uuid: str
    gpu_instance: int
    multiprocessors: int = 16
    memory_mib: int = 18_048
    statuses: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """C functions that write through the references they are handed, as NVML's do."""

    def __init__(
        self, gpus: Sequence[FakeGpu], *, init: int = 0, lacks: Sequence[str] = ()
    ) -> None:
        self.gpus = gpus
        self.init = init
        self.lacks = frozenset(lacks)
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.lacks or f"_{name}" not in dir(type(self)):
            raise AttributeError(name)
        method = getattr(self, f"_{name}")

        def function(*arguments: Any) -> Any:
            self.calls.append(name)
            return method(*arguments)

        return function

    def _target(self, handle: ctypes.c_void_p) -> Any:
        number = handle.value or 0
        gpu = self.gpus[number % 100 - 1]
        return gpu if number < 100 else gpu.slices[number // 100 - 1]

    def _write(self, name: str, handle: ctypes.c_void_p, *pairs: tuple[Any, str, Any]) -> int:
        status = self._target(handle).statuses.get(name, 0)
        if status == 0:
            for reference, attribute, value in pairs:
                setattr(reference._obj, attribute, value)
        return status

    def _nvmlInit_v2(self) -> int:
        return self.init

    def _nvmlShutdown(self) -> int:
        return 0

    def _nvmlErrorString(self, status: int) -> bytes:
        return {9: b"Driver Not Loaded", 15: b"GPU is lost"}.get(status, b"some words")

    def _nvmlSystemGetDriverVersion(self, buffer: Any, length: Any) -> int:
        buffer.value = b"580.159.04"
        return 0

    def _nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        version._obj.value = 13000
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return self.gpus[index.value].statuses.get("handle", 0)

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> int:
        buffer.value = self._target(handle).uuid.encode()
        return 0

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> int:
        target = self._target(handle)
        buffer.value = getattr(target, "name", "NVIDIA H200 MIG 1g.18gb").encode()
        return 0

    def _nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        pair = self._target(handle).capability
        return self._write("cc", handle, (major, "value", pair[0]), (minor, "value", pair[1]))

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:
        return self._write("pci", handle, (info, "bus_id", self._target(handle).bus_id.encode()))

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        return self._write("memory", handle, (memory, "total", self._target(handle).memory))

    def _nvmlDeviceGetNumGpuCores(self, handle: Any, cores: Any) -> int:
        return self._write("cores", handle, (cores, "value", self._target(handle).cores))

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        return self._write("mig", handle, (current, "value", self._target(handle).mig))

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        return self._write("max", handle, (count, "value", len(self._target(handle).slices)))

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, slot: Any, mig: Any) -> int:
        if self._target(handle).slices[slot.value] is None:
            return NOT_FOUND
        mig._obj.value = handle.value + 100 * (slot.value + 1)
        return 0

    def _nvmlDeviceGetAttributes_v2(self, handle: Any, attributes: Any) -> int:
        found = self._target(handle)
        pairs = {"multiprocessor_count": found.multiprocessors, "memory_mib": found.memory_mib}
        return self._write("attributes", handle, *((attributes, k, v) for k, v in pairs.items()))

    def _nvmlDeviceGetGpuInstanceId(self, handle: Any, number: Any) -> int:
        return self._write("gi", handle, (number, "value", self._target(handle).gpu_instance))

    def _nvmlDeviceGetComputeInstanceId(self, handle: Any, number: Any) -> int:
        return self._write("ci", handle, (number, "value", 0))


def test_facts_of_a_gpu_and_of_the_driver() -> None:
    nvml = FakeNvml([FakeGpu()])
    reading = read_driver(nvml)
    assert (reading.source, reading.driver_version) == ("NVML", "580.159.04")
    assert reading.cuda_version == (13, 0)
    (gpu,) = reading.gpus
    assert (gpu.uuid, gpu.name) == ("GPU-11111111-0000-0000-0000-000000000000", "NVIDIA H200")
    assert (gpu.capability, gpu.memory_bytes, gpu.compute_units) == ((9, 0), 150_754_820_096, 132)
    assert gpu.pci_bus_id == "00000000:18:00.0"
    assert not gpu.is_mig_enabled
    assert nvml.calls[0] == "nvmlInit_v2"
    assert nvml.calls[-1] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("capability", "cores", "multiprocessors"),
    [((8, 0), 6912, 108), ((8, 9), 16384, 128), ((12, 0), 21760, 170), ((99, 0), 4096, None)],
)
def test_multiprocessors_follow_from_cores_where_the_architecture_is_known(
    capability: tuple[int, int], cores: int, multiprocessors: int | None
) -> None:
    (gpu,) = read_driver(FakeNvml([FakeGpu(capability=capability, cores=cores)])).gpus
    assert gpu.compute_units == multiprocessors


def test_gpus_come_in_the_order_of_their_pci_addresses() -> None:
    gpus = [FakeGpu(bus_id="00000000:9A:00.0"), FakeGpu(bus_id="00000000:18:00.0")]
    assert [gpu.pci_bus_id[9:11] for gpu in read_driver(FakeNvml(gpus)).gpus] == ["18", "9A"]


def test_mig_devices_have_their_own_memory_and_multiprocessors() -> None:
    slices = [FakeSlice("MIG-a", 9), None, FakeSlice("MIG-b", 11, 32, 36_096)]
    (gpu,) = read_driver(FakeNvml([FakeGpu(mig=1, slices=slices)])).gpus
    assert gpu.is_mig_enabled
    found = [(m.uuid, m.gpu_instance, m.compute_units, m.memory_bytes) for m in gpu.mig_devices]
    assert found == [("MIG-a", 9, 16, 18_048 * 2**20), ("MIG-b", 11, 32, 36_096 * 2**20)]
    assert all(mig.name == "NVIDIA H200 MIG 1g.18gb" for mig in gpu.mig_devices)


def test_facts_that_a_gpu_does_not_have_are_none() -> None:
    statuses = {"memory": NOT_SUPPORTED, "cores": NOT_SUPPORTED, "mig": NOT_SUPPORTED}
    (gpu,) = read_driver(FakeNvml([FakeGpu(statuses=statuses)])).gpus
    assert (gpu.memory_bytes, gpu.compute_units, gpu.is_mig_enabled) == (None, None, False)


def test_an_older_driver_without_some_functions_still_answers() -> None:
    lacks = [
        "nvmlDeviceGetNumGpuCores",
        "nvmlDeviceGetMigMode",
        "nvmlSystemGetCudaDriverVersion_v2",
    ]
    reading = read_driver(FakeNvml([FakeGpu()], lacks=lacks))
    assert reading.cuda_version is None
    assert reading.gpus[0].compute_units is None


def test_a_lost_gpu_is_reported_and_hides_no_other() -> None:
    lost = FakeGpu(statuses={"handle": GPU_IS_LOST})
    reading = read_driver(FakeNvml([lost, FakeGpu()]))
    assert len(reading.gpus) == 1
    assert reading.problems == (
        "GPU 0: nvmlDeviceGetHandleByIndex_v2: GPU is lost (NVML status 15)",
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (9, "Driver Not Loaded .NVML status 9.; load the kernel module"),
        (18, "reboot"),
        (999, "smi"),
    ],
)
def test_a_driver_that_does_not_start_is_unavailable_with_a_remedy(status: int, words: str) -> None:
    nvml = FakeNvml([], init=status)
    with pytest.raises(DriverUnavailableError, match=words):
        read_driver(nvml)
    assert "nvmlShutdown" not in nvml.calls


def test_nvml_is_shut_down_after_a_failure() -> None:
    nvml = FakeNvml([FakeGpu()], lacks=["nvmlDeviceGetCount_v2"])
    with pytest.raises(NvmlError, match="not in this driver"):
        read_driver(nvml)
    assert nvml.calls[-1] == "nvmlShutdown"


def test_without_the_library_the_loaders_words_and_the_remedy_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attn_cuda._vendor.nvml._LIBRARY_NAME", "libno-such-library.so.1")
    with pytest.raises(DriverUnavailableError, match=r"libno-such-library\.so\.1.*install the"):
        load_library()
