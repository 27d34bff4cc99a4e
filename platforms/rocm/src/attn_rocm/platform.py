"""The platform of AMD GPUs: detection by the kernel's topology files, which starts no runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from attn_rocm._vendor import aiter, flash_attn, triton
from attn_rocm.devices import Visible, find_visible, torch_devices
from attn_rocm.kfd import KfdReading, read_kfd
from attn_rocm.priorities import MLA_PREFILL_PRIORITIES, MLA_PRIORITIES, PRIORITIES
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.device_summary import summarize
from attn_shared.inventory import VendorSpec
from attn_shared.platform import Availability, Candidate, Platform
from attn_shared.ranking import check_vendor, rank
from attn_shared.request import AttentionRequest
from attn_shared.torch_build import Runtime, TorchBuild

__all__ = ["RocmPlatform"]

_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_ENVIRONMENT = (*_VARIABLES, "HSA_OVERRIDE_GFX_VERSION")


class RocmPlatform(Platform):
    """The AMD GPUs that this process may use.

    The topology is read once. What the variables hide is worked out anew when they change, and once
    torch runs HIP its own list counts, since then the variables no longer do.

    Args:
        torch_build: what torch was built for.
        environ: the environment of the runtime: the variables that filter devices.
        sysfs: the folder that stands for "/sys".
        device_folder: the folder that stands for "/dev".
        torch_devices: the devices as torch counts them, or None while its runtime is not up.
    """

    name: ClassVar[str] = "rocm"
    vendor: ClassVar[Vendor] = Vendor.AMD
    torch_device_type: ClassVar[str] = "cuda"  # torch for ROCm keeps CUDA's names
    distribution: ClassVar[str] = "attn-rocm"
    precedence: ClassVar[int] = 20

    def __init__(
        self,
        *,
        torch_build: TorchBuild | None = None,
        environ: Mapping[str, str] = os.environ,
        sysfs: Path = Path("/sys"),
        device_folder: Path = Path("/dev"),
        torch_devices: Callable[[], tuple[DeviceFacts, ...] | None] = torch_devices,
    ) -> None:
        self._torch_build = torch_build or TorchBuild.current()
        self._environ = environ
        self._sysfs = sysfs
        self._device_folder = device_folder
        self._torch_devices = torch_devices
        self._seen: tuple[tuple[str | None, ...], Visible] | None = None

    def availability(self) -> Availability:
        """Say whether torch can use a GPU here; if not, all that stands in the way."""
        running = self._torch_devices()
        if running:
            return Availability(is_available=True, reason=_describe(Visible(devices=running)))
        seen = self._visible()
        problems = [self._torch_build.problem(Runtime.ROCM)]
        problems.insert(0, self._device_problem() if seen.devices else self._absence(seen))
        found = [problem for problem in problems if problem]
        shown = _describe(seen)
        if found and shown:
            found.append(f"the kernel shows {shown}")
        return Availability(is_available=not found, reason="; ".join(found) or shown)

    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the visible GPUs in torch's order, also where this torch cannot use them."""
        running = self._torch_devices()
        return self._visible().devices if running is None else running

    def candidates(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Candidate, ...]:
        """Return the backends offered on AMD GPUs, best rank first.

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
        """Return how to find the attention libraries for AMD GPUs."""
        return (aiter.SPEC, flash_attn.SPEC, triton.SPEC)

    def supported_dtypes(self, device: DeviceFacts) -> tuple[torch.dtype, ...]:
        """Return the compute dtypes, which torch for ROCm serves on every GPU that it runs on.

        Raises:
            InvalidInputError: the device is another vendor's.
        """
        check_vendor(device, self.vendor)
        return (torch.bfloat16, torch.float16, torch.float32)

    @cached_property
    def _reading(self) -> KfdReading:
        return read_kfd(self._sysfs)

    def _visible(self) -> Visible:
        key = tuple(map(self._environ.get, _ENVIRONMENT))
        if self._seen is None or self._seen[0] != key:
            self._seen = (key, find_visible(self._reading, self._environ))
        return self._seen[1]

    def _absence(self, seen: Visible) -> str:
        """Say why no GPU is visible."""
        if not self._reading.is_present:
            return (
                "no AMD GPU driver: the kernel has no compute topology (class/kfd in sysfs); "
                "install ROCm's driver amdgpu, and in a container pass /dev/kfd and /dev/dri"
            )
        if self._reading.gpus:
            words = ", ".join(f"{v}={self._environ[v]!r}" for v in _VARIABLES if v in self._environ)
            problem = f" ({seen.problem})" if seen.problem else ""
            return f"{words} hides all {len(self._reading.gpus)} AMD GPUs{problem}: unset it"
        if self._reading.num_hidden:
            return (
                f"{self._reading.num_hidden} nodes of the compute topology may not be read: give "
                "this container its GPUs (--device=/dev/kfd --device=/dev/dri)"
            )
        return "the driver amdgpu lists no GPU that can compute"

    def _device_problem(self) -> str | None:
        """Say whether this user may open the driver's device node."""
        node = self._device_folder / "kfd"
        if not node.exists():
            return f"{node} is not there: in a container pass it (--device=/dev/kfd)"
        if not os.access(node, os.R_OK | os.W_OK):
            return f"{node} may not be opened by this user: join its group (render or video)"
        return None


def _describe(seen: Visible) -> str:
    """Name the devices with their source; "" where there are none."""
    if not seen.devices:
        return ""
    words = [summarize(seen.devices), *seen.devices[0].notes[:1], seen.problem]
    return "; ".join(filter(None, words))
