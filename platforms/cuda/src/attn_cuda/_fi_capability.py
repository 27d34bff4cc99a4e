"""What FLASHINFER and FLASHINFER_TRTLLM can do on a device."""

from __future__ import annotations

import torch

from attn_cuda._fi_loaded import LIBRARY
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
from attn_shared.inventory import Inventory, VendorEntry, VendorStatus
from attn_shared.request import AttentionRequest

__all__ = ["NAME", "capability_on", "library_rules", "lse_rule"]

NAME = "FLASHINFER"

HEAD_SIZES = (64, 128, 256)
"""Widths of heads whose kernels compile and run. 96 compiles in 0.6.13 and then stops with an
illegal instruction; 512 is in no table of its Hopper kernels and was never run here."""

LSE_GROUPS = (1, 2, 3, 4, 8)
"""Query heads per kv head that plain decode is compiled for."""

FP8 = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})


def capability_on(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return FLASHINFER's capability.

    ALiBi is not served: its wrappers take no slopes (they make their own of the number of heads),
    add the bias before the cap and count positions from the row, not from the sequence's start.
    Sinks are not: the wrappers accept them for trtllm-gen alone, and drop them otherwise.
    """
    is_hopper = device.capability is not None and device.capability.is_family(9)
    return Capability(
        devices=(DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0), below=(12, 2)),),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_sizes=SizeSet.of(*HEAD_SIZES),
        kv_cache_dtypes=frozenset({"auto"}) | FP8,
        block_sizes=(MultipleOf(16),),
        preferred_block_size=16,
        kv_layouts=(KVCacheLayout.NHD, KVCacheLayout.HND),
        window=Support.YES,
        softcap=Support.YES,
        non_causal=Support.YES,
        kv_connector=Support.YES,
        lse=Support.YES if is_hopper else Support.NO,
        dcp=Support.YES if is_hopper else Support.NO,
        needs_exact_host_lengths=True,
        counts_short_extends_as_decodes=True,
        rules=(*library_rules(inventory), lse_rule()),
        needs_probe=unprobed(inventory),
    )


def unprobed(inventory: Inventory) -> tuple[str, ...]:
    """Return the library while its build is not known."""
    is_present = inventory.get(LIBRARY).status is VendorStatus.PRESENT
    return (LIBRARY,) if is_present else ()


def library_rules(inventory: Inventory) -> tuple[Rule, ...]:
    """Return the rule of an installation whose kernels cannot be had."""
    entry = inventory.get(LIBRARY)

    def compiles(_request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        if entry.build is None or not _lacks_kernels(entry):
            return None
        return Reason(
            code="compiler",
            value="no nvcc, no flashinfer-jit-cache",
            allowed="one of them: kernels are compiled at first use, or shipped by the package",
            hint="install a CUDA toolkit and set CUDA_HOME, or pip install flashinfer-jit-cache",
        )

    return (Rule(name="flashinfer_compiles", check=compiles),)


def _lacks_kernels(entry: VendorEntry) -> bool:
    build = entry.build
    if build is None:
        return False
    return build.flag("compiler") == "off" and build.flag("jit_cache") == "unknown"


def lse_rule() -> Rule:
    """Return the rule of layers whose LSE some kernel has.

    The kernels "fa2", decode on tensor cores included, sum weights that are rounded to the layer's
    dtype: on an H200 their LSE was 7e-4 to 1.4e-3 off, where the contract allows 3e-6. Those of
    Hopper and plain decode do not. Under a cap, tanh is one approximate instruction (2^-11).
    """

    def check(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        if not (request.needs_lse or request.dcp_size > 1):
            return None
        group = request.num_heads // request.num_kv_heads
        groups = ", ".join(map(str, LSE_GROUPS))
        lacking = {
            "with softcap, whose tanh its kernels approximate": request.softcap is not None,
            "over an fp8 cache, where rounded weights are summed": request.kv_cache_dtype in FP8,
            f"with {group} query heads per kv head; its plain decode has {groups}": group
            not in LSE_GROUPS,
        }
        words = next((words for words, is_lacking in lacking.items() if is_lacking), None)
        return None if words is None else Reason(code="lse", value="True", allowed=f"False {words}")

    return Rule(name="flashinfer_lse", check=check)
