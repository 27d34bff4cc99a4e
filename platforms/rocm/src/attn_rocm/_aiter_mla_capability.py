"""What AITER's kernels over latents can do, as data: by the checks of its wheel and its head."""

from __future__ import annotations

import torch

from attn_rocm._aiter_build import DEVICES, LIBRARY, build_in, missing_call
from attn_rocm._aiter_mla_call import KERNEL_HEADS
from attn_shared.capability import Capability, MultipleOf, Reason, Rule, SizeSet, Support
from attn_shared.device import DeviceFacts
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.mla_heads import head_count_objection
from attn_shared.mla_prefill import prefill_capability
from attn_shared.request import AttentionRequest

__all__ = ["LATENTS", "MOST_ROWS", "latents_capability", "prefills_capability"]

LATENTS = "ROCM_AITER_MLA"

MOST_ROWS = 4
"""Query tokens of a decode that the kernels take."""

_HALVES = frozenset({torch.float16, torch.bfloat16})
_RANK, _ROPE = 512, 64


def latents_capability(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return what ROCM_AITER_MLA can do with the release that is installed.

    Keys that lie on several ranks are merged by their LSE, which the wheel 0.1.7 does not return.
    """
    found = inventory.get(LIBRARY).build
    lacks_lse = found is not None and "mla_decode_fwd.return_lse" not in found.optional_arguments
    lse = Support.NO if lacks_lse else Support.YES

    def has_call(_request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        return missing_call(build_in(inventory), ("mla_decode_fwd",))

    return Capability(
        devices=DEVICES,
        dtypes=_HALVES,
        head_sizes=SizeSet.of(_RANK + _ROPE),
        kv_cache_dtypes=frozenset({"auto", "fp8", "fp8_e4m3"}),
        block_sizes=(MultipleOf(1),),
        preferred_block_size=16,
        is_mla=True,
        fp8_products=True,
        lse=lse,
        dcp=lse,
        kv_connector=Support.YES,
        rules=(
            Rule(name="aiter_calls", check=has_call),
            Rule(name="kernel_heads", check=_kernel_heads),
            Rule(name="latent_widths", check=_widths),
        ),
        needs_probe=_unprobed(inventory),
    )


def prefills_capability(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return what ROCM_AITER_FA can prefill over latents."""

    def has_call(_request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        needed = ("flash_attn_varlen_func", "mha_batch_prefill_func", "paged_attention_v1")
        return missing_call(build_in(inventory), needed)

    return prefill_capability(
        DEVICES,
        _HALVES,
        rules=(Rule(name="aiter_calls", check=has_call),),
        non_causal=Support.YES,
        needs_probe=_unprobed(inventory),
    )


def _unprobed(inventory: Inventory) -> tuple[str, ...]:
    return (LIBRARY,) if inventory.get(LIBRARY).status is VendorStatus.PRESENT else ()


def _kernel_heads(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    return head_count_objection(request.num_heads, KERNEL_HEADS)


def _widths(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    dims = request.mla
    if dims is None or dims.latent_size != _RANK + _ROPE or dims.kv_lora_rank == _RANK:
        return None
    return Reason(
        code="mla_dims",
        value=f"kv_lora_rank={dims.kv_lora_rank} with qk_rope_head_dim={dims.qk_rope_head_dim}",
        allowed=f"{_RANK} with {_ROPE}",
    )
