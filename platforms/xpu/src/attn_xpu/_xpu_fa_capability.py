"""What XPU_FLASH_ATTN can do: what the kernels of vllm-xpu-kernels have, and nothing they drop.

Limits are those that the wheel 0.1.16.2 states itself, in one library for each architecture.
"""

from __future__ import annotations

import torch

from attn_shared.capability import (
    Capability,
    DeviceLimit,
    MultipleOf,
    Reason,
    Rule,
    SizeSet,
    Support,
)
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import KVCacheLayout
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.request import AttentionRequest, AttentionType

__all__ = ["ARCHS", "FP8_DTYPES", "LIBRARY", "NAME", "capability_of_kernels", "capability_on"]

NAME = "XPU_FLASH_ATTN"
LIBRARY = "vllm_xpu_kernels"

_XE2 = ("bmg", "lnl")
_XE3 = ("ptl", "wcl", "nvl-s", "nvl-u")
ARCHS = (*_XE2, *_XE3)
"""Those that the library's dispatch knows; it refuses others when a kernel is called."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Of caches that the kernels read."""

_BLOCK_MULTIPLE = 16
_PREFERRED_BLOCK = 64  # most kernels that the wheel has compiled are for multiples of it
_HEAD_SIZE_MAX = 512
_FP8_NAMES = ("fp8", "fp8_e4m3", "fp8_e5m2")
_LOADED_AT_ONCE = 16  # bytes of a head


def capability_on(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return the capability.

    Its call has softcap and ALiBi slopes as arguments, and its kernels drop both without a word
    (vllm-xpu-kernels#489): neither is served. Nor are fp8 scales per head, for its descales are
    views of one number, or batch-invariant steps, for it splits keys by the batch.
    """
    return capability_of_kernels(inventory)


def capability_of_kernels(inventory: Inventory) -> Capability:
    """Return what the kernels have, which is the same on every device that they are for."""
    is_present = inventory.get(LIBRARY).status is VendorStatus.PRESENT
    return Capability(
        devices=(DeviceLimit(vendor=Vendor.INTEL, archs=ARCHS),),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_sizes=SizeSet(minimum=8, maximum=_HEAD_SIZE_MAX, multiple_of=8),
        kv_cache_dtypes=frozenset({"auto", *_FP8_NAMES}),
        block_sizes=(MultipleOf(_BLOCK_MULTIPLE),),
        preferred_block_size=_PREFERRED_BLOCK,
        attn_types=frozenset(AttentionType),
        kv_layouts=(KVCacheLayout.NHD,),
        sinks=Support.YES,
        window=Support.YES,
        two_sided_window=Support.YES,
        non_causal=Support.YES,
        kv_connector=Support.YES,
        lse=Support.YES,
        rules=(
            Rule(name="lse_without_window", check=_lse_has_no_window),
            Rule(name="fp8_head_size", check=_fp8_heads_are_loadable),
            Rule(name="pages_of_xe3", check=_pages_of_xe3),
            Rule(name="lse_of_xe3", check=_lse_of_xe3),
        ),
        needs_probe=(LIBRARY,) if is_present else (),
    )


def _lse_has_no_window(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    if not (request.needs_lse and request.has_window):
        return None
    return Reason(code="lse", value="True", allowed="False with a window")


def _fp8_heads_are_loadable(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    is_fp8 = request.kv_cache_dtype in _FP8_NAMES
    if not is_fp8 or request.head_size % _LOADED_AT_ONCE == 0:
        return None
    allowed = f"a multiple of {_LOADED_AT_ONCE} with an fp8 cache"
    return Reason(code="head_size", value=str(request.head_size), allowed=allowed)


def _pages_of_xe3(request: AttentionRequest, device: DeviceFacts) -> Reason | None:
    size = request.block_size
    if device.arch not in _XE3 or size is None or size in (16, 32) or size % 64 == 0:
        return None
    allowed = f"16, 32 or a multiple of 64 on {device.arch}"
    return Reason(code="block_size", value=str(size), allowed=allowed)


def _lse_of_xe3(request: AttentionRequest, device: DeviceFacts) -> Reason | None:
    if device.arch not in _XE3 or not request.needs_lse or request.is_cache_free:
        return None
    return Reason(code="lse", value="True", allowed=f"False with a cache on {device.arch}")
