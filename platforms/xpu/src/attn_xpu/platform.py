"""The platform of Intel GPUs: detection by the kernel's files, which starts no XPU runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from attn_shared.device import DeviceFacts, Vendor
from attn_shared.device_summary import summarize
from attn_shared.inventory import VendorSpec
from attn_shared.platform import Availability, Candidate, Platform
from attn_shared.ranking import check_vendor, rank
from attn_shared.request import AttentionRequest
from attn_shared.torch_build import Runtime, TorchBuild
from attn_xpu._vendor import ipex, triton, vllm_xpu_kernels
from attn_xpu._vendor.level_zero import loader_problem
from attn_xpu.devices import Visible, find_visible, runtime_version, torch_devices
from attn_xpu.drm import Card, read_cards
from attn_xpu.priorities import MLA_PREFILL_PRIORITIES, MLA_PRIORITIES, PRIORITIES

__all__ = ["XpuPlatform"]

_ENVIRONMENT = ("ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ONEAPI_DEVICE_SELECTOR")


class XpuPlatform(Platform):
    """The Intel GPUs that this process may use.

    The kernel's files are read once. What the variables hide is worked out anew when they change,
    and once torch runs XPU its own list counts, since then the variables no longer do.

    Args:
        torch_build: what torch was built for.
        environ: the environment of the runtime: the variables that filter devices.
        sysfs: the folder that stands for "/sys".
        device_folder: the folder that stands for "/dev".
        loader_problem: says why Level Zero's loader cannot be opened, or None.
        torch_devices: the devices as torch counts them, or None while its runtime is not up.
        runtime_version: that of the compute runtime, or None while torch's is not up.
    """

    name: ClassVar[str] = "xpu"
    vendor: ClassVar[Vendor] = Vendor.INTEL
    torch_device_type: ClassVar[str] = "xpu"
    distribution: ClassVar[str] = "attn-xpu"
    precedence: ClassVar[int] = 30

    def __init__(
        self,
        *,
        torch_build: TorchBuild | None = None,
        environ: Mapping[str, str] = os.environ,
        sysfs: Path = Path("/sys"),
        device_folder: Path = Path("/dev"),
        loader_problem: Callable[[], str | None] = loader_problem,
        torch_devices: Callable[[], tuple[DeviceFacts, ...] | None] = torch_devices,
        runtime_version: Callable[[], str | None] = runtime_version,
    ) -> None:
        self._torch_build = torch_build or TorchBuild.current()
        self._environ = environ
        self._sysfs = sysfs
        self._device_folder = device_folder
        self._loader_problem = loader_problem
        self._torch_devices = torch_devices
        self._runtime_version = runtime_version
        self._seen: tuple[tuple[str | None, ...], Visible] | None = None

    def availability(self) -> Availability:
        """Say whether torch can use a GPU here; if not, all that stands in the way."""
        running = self._torch_devices()
        if running:
            return Availability(is_available=True, reason=_describe(Visible(devices=running)))
        seen = self._visible()
        problems = [self._absence(seen)]
        if seen.devices:
            problems = [self._node_problem(seen), self._loading_problem]
        problems.append(self._torch_build.problem(Runtime.XPU))
        found = [problem for problem in problems if problem]
        shown = _describe(seen)
        if found and shown:
            found.append(f"the kernel shows {shown}")
        return Availability(is_available=not found, reason="; ".join(found) or shown)

    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the visible GPUs in torch's order, also where this torch cannot use them.

        A device whose place in that order is not known has no `index`, and a note that says why.
        Memory and Xe cores are known only once torch.xpu runs.
        """
        running = self._torch_devices()
        return self._visible().devices if running is None else running

    def candidates(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Candidate, ...]:
        """Return the backends offered on Intel GPUs, best rank first.

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
        """Return how to find the attention libraries for Intel GPUs."""
        return (vllm_xpu_kernels.SPEC, ipex.SPEC, triton.SPEC)

    def versions(self) -> dict[str, str]:
        """Return the kernel's graphics drivers, and the compute runtime's version and torch's.

        No runtime is started: that of the compute runtime is known once torch.xpu runs.
        """
        cards = self._visible().cards
        drivers = sorted({card.driver for card in cards if card.driver})
        found = {
            "graphics driver": ", ".join(map(self._driver_version, drivers)),
            "compute runtime": self._runtime_version() or "",
            "SYCL of torch": self._torch_build.xpu or "",
        }
        return {name: version for name, version in found.items() if version}

    def supported_dtypes(self, device: DeviceFacts) -> tuple[torch.dtype, ...]:
        """Return the compute dtypes, which torch for XPU serves on every GPU that it runs on.

        Raises:
            InvalidInputError: the device is another vendor's.
        """
        check_vendor(device, self.vendor)
        return (torch.bfloat16, torch.float16, torch.float32)

    @cached_property
    def _cards(self) -> tuple[Card, ...]:
        return read_cards(self._sysfs)

    def _driver_version(self, driver: str) -> str:
        """Name a module of the kernel, with its version where it has one of its own."""
        try:
            version = (self._sysfs / "module" / driver / "version").read_text(encoding="utf-8")
        except OSError:
            return driver  # it came with the kernel
        return f"{driver} {version.strip()}"

    @cached_property
    def _loading_problem(self) -> str | None:
        return self._loader_problem()

    def _visible(self) -> Visible:
        key = tuple(map(self._environ.get, _ENVIRONMENT))
        if self._seen is None or self._seen[0] != key:
            self._seen = (key, find_visible(self._cards, self._environ))
        return self._seen[1]

    def _absence(self, seen: Visible) -> str | None:
        """Say why no GPU is visible; None if one is."""
        if seen.devices:
            return None
        if self._cards:
            value = self._environ.get("ZE_AFFINITY_MASK")
            problem = f" ({seen.problem})" if seen.problem else ""
            return f"ZE_AFFINITY_MASK={value!r} hides all Intel GPUs{problem}: unset it"
        if not (self._sysfs / "class").is_dir() or (self._device_folder / "dxg").exists():
            return (
                "no Intel GPU is listed: this system has no graphics drivers in sysfs; where torch "
                "itself sees one, call torch.xpu.init() first"
            )
        return (
            "no Intel GPU: no graphics driver (xe or i915) lists one in sysfs; install the driver, "
            "and in a container pass /dev/dri"
        )

    def _node_problem(self, seen: Visible) -> str | None:
        """Say whether this user may open the driver's device nodes."""
        for card in seen.cards:
            node = self._device_folder / "dri" / card.render_node
            if not node.exists():
                return f"{node} is not there: in a container pass it (--device=/dev/dri)"
            if not os.access(node, os.R_OK | os.W_OK):
                return f"{node} may not be opened by this user: join its group (render)"
        return None


def _describe(seen: Visible) -> str:
    """Name the devices with their source; "" where there are none."""
    if not seen.devices:
        return ""
    problem = f"ZE_AFFINITY_MASK: {seen.problem}" if seen.problem else ""
    words = [summarize(seen.devices), *seen.devices[0].notes[:1], problem]
    return "; ".join(filter(None, words))
