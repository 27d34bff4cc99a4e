"""The platform of NVIDIA GPUs: detection by NVML, which starts no CUDA runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from attn_cuda._vendor import (
    fa3_fwd,
    flash_attn,
    flash_attn_3,
    flash_attn_4,
    flash_mla,
    flashinfer,
    triton,
    vllm_cutlass_mla,
    vllm_flash_attn_2,
    vllm_flash_attn_3,
)
from attn_cuda._vendor.cuda_driver import ask_driver
from attn_cuda._vendor.nvml import DriverUnavailableError, read_driver
from attn_cuda.devices import Visible, facts_of, find_visible, torch_gpus
from attn_cuda.gpus import DriverReading, Gpu
from attn_cuda.priorities import MLA_PREFILL_PRIORITIES, MLA_PRIORITIES, PRIORITIES
from attn_cuda.toolkit import Toolkit, find_toolkit
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.device_summary import summarize
from attn_shared.inventory import VendorSpec
from attn_shared.platform import Availability, Candidate, Platform
from attn_shared.ranking import check_vendor, rank
from attn_shared.request import AttentionRequest
from attn_shared.torch_build import Runtime, TorchBuild

__all__ = ["CudaPlatform"]

# Left by the kernel modules of the driver: on Linux, on WSL, on Jetson.
_DEVICE_NODES = ("nvidiactl", "dxg", "nvhost-ctrl", "nvgpu")

_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


class CudaPlatform(Platform):
    """The NVIDIA GPUs that this process may use.

    The driver is asked once. What CUDA_VISIBLE_DEVICES hides is worked out anew when the variable
    changes, and once torch runs CUDA its own list counts, since then the variable no longer does.

    Args:
        torch_build: what torch was built for.
        environ: the environment of CUDA: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
        read_driver: asks the management library.
        ask_driver: asks the CUDA driver in a child process, given its environment.
        torch_gpus: the GPUs as torch counts them, or None while its runtime is not up.
        device_folder: where the driver's device nodes are.
        find_toolkit: looks for the CUDA toolkit, given the environment.
    """

    name: ClassVar[str] = "cuda"
    vendor: ClassVar[Vendor] = Vendor.NVIDIA
    torch_device_type: ClassVar[str] = "cuda"
    distribution: ClassVar[str] = "attn-cuda"
    precedence: ClassVar[int] = 10
    samplers: ClassVar[tuple[str, ...]] = (
        "attn_cuda.backends.flashinfer_sampler:FlashInferSampler",
    )

    def __init__(
        self,
        *,
        torch_build: TorchBuild | None = None,
        environ: Mapping[str, str] = os.environ,
        read_driver: Callable[[], DriverReading] = read_driver,
        ask_driver: Callable[[Mapping[str, str]], DriverReading] = ask_driver,
        torch_gpus: Callable[[], tuple[Gpu, ...] | None] = torch_gpus,
        device_folder: Path = Path("/dev"),
        find_toolkit: Callable[[Mapping[str, str]], Toolkit | None] = find_toolkit,
    ) -> None:
        self._torch_build = torch_build or TorchBuild.current()
        self._environ = environ
        self._read_driver = read_driver
        self._ask_driver = ask_driver
        self._torch_gpus = torch_gpus
        self._device_folder = device_folder
        self._find_toolkit = find_toolkit
        self._seen: tuple[tuple[str | None, ...], Visible] | None = None

    def availability(self) -> Availability:
        """Say whether torch can use a GPU here; if not, all that stands in the way."""
        seen = self._visible()
        problems = [self._torch_build.problem(Runtime.CUDA), self._version_problem(seen.reading)]
        if not seen.devices:
            problems.insert(0, seen.problem or self._hidden(seen.reading))
        found = [problem for problem in problems if problem]
        shown = _describe(seen)
        if found and shown:
            found.append(f"the driver shows {shown}")
        return Availability(is_available=not found, reason="; ".join(found) or shown)

    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the visible GPUs in torch's order, also where this torch cannot use them.

        A device whose place in that order is not known has no `index`, and a note that says why.
        """
        return self._visible().devices

    def candidates(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Candidate, ...]:
        """Return the backends offered on NVIDIA GPUs, best rank first.

        Raises:
            InvalidInputError: the device is another vendor's.
        """
        check_vendor(device, self.vendor)
        table = MLA_PRIORITIES if request.use_mla else PRIORITIES
        return rank(table, request, device)

    def mla_prefills(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Candidate, ...]:
        """Return the prefills over latents, best rank first.

        Raises:
            InvalidInputError: the device is another vendor's.
        """
        check_vendor(device, self.vendor)
        return rank(MLA_PREFILL_PRIORITIES, request, device)

    def vendor_specs(self) -> tuple[VendorSpec, ...]:
        """Return how to find the attention libraries for NVIDIA GPUs."""
        modules = (
            *(flash_attn, flash_attn_3, fa3_fwd, flash_attn_4, vllm_flash_attn_2),
            *(vllm_flash_attn_3, flashinfer, flash_mla, vllm_cutlass_mla, triton),
        )
        return tuple(module.SPEC for module in modules)

    def versions(self) -> dict[str, str]:
        """Return the versions of the driver, of CUDA in driver and torch, and of the toolkit.

        Neither the runtime nor a program is started; what is not known is left out.
        """
        reading = self._reading if isinstance(self._reading, DriverReading) else None
        cuda = None if reading is None else reading.cuda_version
        toolkit = self._find_toolkit(self._environ)
        found = {
            "driver": reading.driver_version if reading is not None else "",
            "CUDA of the driver": "" if cuda is None else "{}.{}".format(*cuda),
            "CUDA of torch": self._torch_build.cuda or "",
            "CUDA toolkit": "" if toolkit is None else str(toolkit),
        }
        return {name: version for name, version in found.items() if version}

    def supported_dtypes(self, device: DeviceFacts) -> tuple[torch.dtype, ...]:
        """Return the compute dtypes; bfloat16 from capability 8.0 on, which has arithmetic for it.

        Raises:
            InvalidInputError: the device is another vendor's.
        """
        check_vendor(device, self.vendor)
        if device.capability is not None and device.capability.at_least(8, 0):
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)

    def _visible(self) -> Visible:
        gpus = self._torch_gpus()
        if gpus is not None:
            notes = ("from torch, whose CUDA runtime is up",)
            return Visible(
                devices=tuple(facts_of(gpu, index=i, notes=notes) for i, gpu in enumerate(gpus))
            )
        key = tuple(map(self._environ.get, _ENVIRONMENT))
        if self._seen is None or self._seen[0] != key:
            self._seen = (key, self._find_visible())
        return self._seen[1]

    def _find_visible(self) -> Visible:
        reading = self._reading
        if isinstance(reading, DriverReading):
            return find_visible(reading, self._environ, self._ask_driver)
        return self._without_nvml(reading)

    @cached_property
    def _reading(self) -> DriverReading | str:
        """What the driver said, or why it did not."""
        try:
            return self._read_driver()
        except DriverUnavailableError as error:
            return str(error)

    def _without_nvml(self, problem: str) -> Visible:
        """Ask CUDA itself in a child process, if a driver has left its device nodes."""
        if not any((self._device_folder / node).exists() for node in _DEVICE_NODES):
            return Visible(devices=(), problem=problem)
        try:
            reading = self._ask_driver(self._environ)
        except DriverUnavailableError as error:
            return Visible(devices=(), problem=f"{problem}; {error}")
        notes = (f"from {reading.source}", problem)
        devices = tuple(facts_of(gpu, index=i, notes=notes) for i, gpu in enumerate(reading.gpus))
        return Visible(devices=devices, reading=reading, problem="" if devices else problem)

    def _version_problem(self, reading: DriverReading | None) -> str | None:
        """Say whether the driver is older than torch's CUDA; within a major any minor serves."""
        wanted = self._torch_build.cuda
        if wanted is None or reading is None or reading.cuda_version is None:
            return None
        major = wanted.partition(".")[0]
        if not major.isdecimal() or reading.cuda_version[0] >= int(major):
            return None
        served = "{}.{}".format(*reading.cuda_version)
        return (
            f"torch {self._torch_build.version} is built for CUDA {wanted}, and the driver "
            f"{reading.driver_version or 'here'} serves CUDA up to {served}: update the driver, or "
            f"install a torch built for CUDA {reading.cuda_version[0]}"
        )

    def _hidden(self, reading: DriverReading | None) -> str:
        """Say why nothing is visible although the driver answers."""
        if reading is None or not reading.gpus:
            version = reading.driver_version if reading is not None else ""
            return f"the NVIDIA driver {version} finds no GPU".replace("  ", " ")
        value = self._environ.get("CUDA_VISIBLE_DEVICES")
        if value is not None:
            return f"CUDA_VISIBLE_DEVICES={value!r} hides all {len(reading.gpus)} GPUs: unset it"
        return "the GPUs are in MIG mode without a MIG device: create one (nvidia-smi mig -cgi)"


def _describe(seen: Visible) -> str:
    """Name the devices with their sources; "" where there are none."""
    if not seen.devices:
        return ""
    words = [summarize(seen.devices), seen.devices[0].notes[0], seen.problem]
    return "; ".join(filter(None, words))
