"""What FLASH_ATTN can do on a device: what its kernels have there, and the rule of its builds."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_cuda._fa_providers import libraries_for, page_multiple, resolve_provider
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

__all__ = ["NAME", "NAME_DIFFKV", "capability_diffkv", "capability_on"]

NAME = "FLASH_ATTN"
NAME_DIFFKV = "FLASH_ATTN_DIFFKV"

_WITH_SINKS = (9, 10, 11)  # majors for which there is a FlashAttention 3 or 4


def capability_on(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return the capability.

    Its data say what some FlashAttention has on the device. What is installed decides in one rule,
    which asks for the provider as a layer's constructor does.
    """
    kernels = _kernels(device, inventory)

    def has_provider(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        if kernels.check(request, device):
            return None  # the data have said why
        if request.block_size is None and not request.is_cache_free:
            request = request.with_options(block_size=kernels.preferred_block_size)
        return resolve_provider(device, inventory, request).reason

    return replace(kernels, rules=(Rule(name="flash_attn_provider", check=has_provider),))


def _kernels(device: DeviceFacts, inventory: Inventory) -> Capability:
    major = 0 if device.capability is None else device.capability.major
    is_new = major in _WITH_SINKS
    multiple = page_multiple(device, inventory)
    return Capability(
        devices=(DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0)),),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_sizes=SizeSet(minimum=8, maximum=256, multiple_of=8),
        head_sizes_v=SizeSet(minimum=8, maximum=512, multiple_of=8) if is_new else None,
        kv_cache_dtypes=frozenset({"auto", "fp8", "fp8_e4m3"} if major == 9 else {"auto"}),
        block_sizes=(MultipleOf(multiple),),
        preferred_block_size=multiple,
        attn_types=frozenset(AttentionType),
        kv_layouts=(KVCacheLayout.NHD, KVCacheLayout.HND),
        sinks=Support.YES if is_new else Support.NO,
        window=Support.YES,
        two_sided_window=Support.YES,
        softcap=Support.YES,
        alibi=Support.YES,
        non_causal=Support.YES,
        batch_invariant=Support.YES,
        kv_connector=Support.YES,
        per_head_quant_scales=Support.YES if major == 9 else Support.NO,
        lse=Support.YES,
        flash_attn_version=Support.YES,
        fp8_products=True,
        needs_probe=_unprobed(device, inventory),
    )


def _unprobed(device: DeviceFacts, inventory: Inventory) -> tuple[str, ...]:
    return tuple(
        name for name in libraries_for(device) if inventory.get(name).status is VendorStatus.PRESENT
    )


def capability_diffkv(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return the same capability for layers whose value heads have a width of their own."""
    capability = capability_on(device, inventory)
    return replace(capability, rules=(*capability.rules, _WIDTHS_DIFFER))


def _differs(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    if request.value_size != request.head_size:
        return None
    return Reason(
        code="head_size_v",
        value=str(request.value_size),
        allowed=f"another width than head_size={request.head_size}",
        hint=f"{NAME} serves equal widths, and others as well",
    )


_WIDTHS_DIFFER = Rule(name="widths_differ", check=_differs)
