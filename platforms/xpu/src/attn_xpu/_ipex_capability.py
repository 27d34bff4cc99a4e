"""What IPEX can do: its CPU build, held to the contract by a run, and its GPU build, not run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_shared.capability import (
    Capability,
    DeviceLimit,
    Exactly,
    MultipleOf,
    Reason,
    Rule,
    SizeSet,
    Support,
)
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import KVCacheLayout
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.limits import BlockSize
from attn_shared.request import AttentionRequest, AttentionType

__all__ = ["LIBRARY", "NAME", "Build", "build_named", "build_of", "capability_of", "capability_on"]

NAME = "IPEX"
LIBRARY = "ipex"

# Blocks of the CPU's build: its call for single queries takes 128 keys at once, whole blocks of
# them. Other blocks end the process: it reads and writes past its buffers.
_PARTS = tuple(Exactly(size) for size in (1, 2, 4, 8, 16, 32, 64, 128))
_HALVES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One of the two builds that the library comes in.

    Attributes:
        name: as the label of its version says, "cpu" or "xpu".
        device: whom it is for.
        layout: of the one cache that all of its calls read.
    """

    name: str
    device: DeviceLimit
    layout: KVCacheLayout


_CPU = Build(
    name="cpu",
    device=DeviceLimit(vendor=Vendor.CPU, archs=("x86_64",)),
    layout=KVCacheLayout.HND,
)
_XPU = Build(name="xpu", device=DeviceLimit(vendor=Vendor.INTEL), layout=KVCacheLayout.NHD)


def build_named(label: str) -> Build:
    """Return the build of a version's label; without one it is the package index's, for CPUs."""
    return _XPU if label.startswith("xpu") else _CPU


def build_of(device: DeviceFacts) -> Build:
    """Return the build that a device needs."""
    return _XPU if device.vendor is Vendor.INTEL else _CPU


def capability_on(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return what the device's build can do, if that is the one that is installed."""
    needed, entry = build_of(device), inventory.get(LIBRARY)

    def is_installed(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        found = None if entry.build is None else entry.build.flag("build")
        if found is None or build_named(found) is needed:
            return None
        return Reason(code="ipex_build", value=found, allowed=f"{needed.name} on {device.arch}")

    is_present = entry.status is VendorStatus.PRESENT
    rule = Rule(name="ipex_build", check=is_installed)
    return capability_of(needed, rules=(rule,), needs_probe=(LIBRARY,) if is_present else ())


def capability_of(
    build: Build, *, rules: tuple[Rule, ...] = (), needs_probe: tuple[str, ...] = ()
) -> Capability:
    """Return what a build's calls do right.

    Slopes are for single queries alone; scales of an fp8 cache are taken and not applied; neither
    an LSE nor sinks are known: none of them is served.
    """
    is_cpu = build is _CPU
    blocks: tuple[BlockSize, ...] = _PARTS if is_cpu else (MultipleOf(64),)
    sizes = SizeSet(minimum=1, maximum=512) if is_cpu else SizeSet.of(64, 128, 192, 256)
    return Capability(
        devices=(build.device,),
        dtypes=_HALVES | {torch.float32} if is_cpu else _HALVES,
        head_sizes=sizes,
        block_sizes=blocks,
        preferred_block_size=64,
        attn_types=frozenset(AttentionType),
        kv_layouts=(build.layout,),
        window=Support.YES,
        two_sided_window=Support.YES,
        softcap=Support.YES,
        non_causal=Support.YES,
        kv_connector=Support.YES,
        rules=(
            Rule(name="own_key_window", check=_own_key_window),
            Rule(name="encoder_extras", check=_encoder_extras),
            *rules,
        ),
        needs_probe=needs_probe,
    )


def _own_key_window(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """A left side of 0 counts as none."""
    if request.window[0] != 0:
        return None
    return Reason(
        code="window",
        value=str(request.window),
        allowed="at least 1 key on the left, or None: its call takes 0 for none",
    )


def _encoder_extras(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Its call for keys without a cache asserts that there is neither."""
    if not request.is_cache_free:
        return None
    for code, asked in (("window", request.has_window), ("softcap", request.softcap is not None)):
        if asked:
            value = str(request.window if code == "window" else request.softcap)
            return Reason(code=code, value=value, allowed="none without a cache")
    return None
