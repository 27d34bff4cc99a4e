"""What the vendors' kernels over latents can do, by device, as data.

Sources: checks of tokenspeed-flashmla 1.0.0.post20260429, sgl-flash-mla 1.0.0, FlashInfer 0.6.13
and 0.7.4, FlashAttention 3 and vLLM 0.25.1's CUTLASS operator; block sizes, thresholds and levels
as vLLM 0.25.1 has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_cuda._cutlass_mla_call import KERNEL_HEADS
from attn_cuda._cutlass_mla_call import PAGE_SIZE as CUTLASS_PAGE
from attn_cuda._fa_mla_call import LIBRARIES, resolve_provider
from attn_cuda._flashmla_call import PAGE_SIZE as FLASHMLA_PAGE
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
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.mla_heads import head_count_objection
from attn_shared.request import AttentionRequest

__all__ = ["BATCHES", "cutlass_mla", "flash_attn_mla", "flashinfer_mla", "flashmla", "is_blackwell"]

_HALVES = frozenset({torch.float16, torch.bfloat16})
_HOPPER = DeviceLimit(vendor=Vendor.NVIDIA, families=(9,))
_BLACKWELL = DeviceLimit(vendor=Vendor.NVIDIA, families=(10,))
_DEEPSEEK = (512, 64)
_SMALL = (256, 64)


BATCHES = Capability(
    devices=(DeviceLimit(vendor=Vendor.NVIDIA),),
    dtypes=_HALVES,
    head_sizes=SizeSet(),
    block_sizes=(1,),
    is_mla=True,
)
"""What all of them say to a batch's own options, whatever the device: that there are none."""


def _latents(widths: Sequence[tuple[int, int]], *rules: Rule, **fields: Any) -> Capability:
    """Return what all of them have in common; an LSE, and so keys that lie on several ranks.

    Args:
        widths: pairs (kv_lora_rank, qk_rope_head_dim) that there are kernels for.
        rules: further ones.
        fields: what is one backend's own.
    """
    common: dict[str, Any] = {
        "dtypes": _HALVES,
        "head_sizes": SizeSet.of(*(sum(pair) for pair in widths)),
        "is_mla": True,
        "lse": Support.YES,
        "dcp": Support.YES,
        "kv_connector": Support.YES,
        "rules": (_width_rule(widths), *rules),
    }
    return Capability(**{**common, **fields})


def _width_rule(widths: Sequence[tuple[int, int]]) -> Rule:
    def check(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        dims = request.mla
        if dims is None or dims.latent_size not in {sum(pair) for pair in widths}:
            return None  # the width of an entry has said why
        if (dims.kv_lora_rank, dims.qk_rope_head_dim) in widths:
            return None
        words = ", ".join(f"{rank} with {rope}" for rank, rope in widths)
        return Reason(
            code="mla_dims",
            value=f"kv_lora_rank={dims.kv_lora_rank} with qk_rope_head_dim={dims.qk_rope_head_dim}",
            allowed=words,
        )

    return Rule(name="latent_widths", check=check)


def flashmla(device: DeviceFacts, inventory: Inventory) -> Capability:
    """FLASHMLA: dense decodes on Hopper; an fp8 cache by sgl-flash-mla's kernels alone."""
    entry = inventory.get("flash_mla")
    build = entry.build
    has_fp8 = build is None or "flash_mla_with_kvcache.descale_k" in build.optional_arguments

    def has_kernels(_request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        if build is None or build.flag("legacy") != "off":
            return None
        return Reason(
            code="flash_mla_build",
            value=f"{entry.distribution} {entry.version}",
            allowed="a build with the kernels of dense decodes (flash_mla.has_legacy())",
            hint='pip install "attn-cuda[flashmla-hopper]"',
        )

    return _latents(
        (_DEEPSEEK,),
        Rule(name="dense_kernels", check=has_kernels),
        devices=(_HOPPER,),
        kv_cache_dtypes=frozenset({"auto", "fp8", "fp8_e4m3"} if has_fp8 else {"auto"}),
        block_sizes=(FLASHMLA_PAGE,),
        preferred_block_size=FLASHMLA_PAGE,
        fp8_products=True,
        needs_probe=_unprobed(inventory, "flash_mla"),
    )


def flash_attn_mla(device: DeviceFacts, inventory: Inventory) -> Capability:
    """FLASH_ATTN_MLA: FlashAttention 3 on Hopper, for any query length and any page of 16 x n."""

    def has_provider(_request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        found = resolve_provider(inventory)
        return found if isinstance(found, Reason) else None

    return _latents(
        (_DEEPSEEK, _SMALL),
        Rule(name="flash_attn_qv", check=has_provider),
        devices=(_HOPPER,),
        block_sizes=(MultipleOf(16),),
        preferred_block_size=16,
        batch_invariant=Support.YES,
        needs_probe=_unprobed(inventory, *LIBRARIES),
    )


def is_blackwell(device: DeviceFacts) -> bool:
    """Whether trtllm-gen's kernels are what FlashInfer runs there."""
    return _BLACKWELL.admits(device)


def flashinfer_mla(device: DeviceFacts, inventory: Inventory) -> Capability:
    """FLASHINFER_MLA: planned kernels on Hopper, trtllm-gen's on Blackwell."""
    probe = _unprobed(inventory, "flashinfer")
    if not is_blackwell(device):
        return _latents(
            (_DEEPSEEK,),
            devices=(_HOPPER, _BLACKWELL),
            block_sizes=(MultipleOf(16),),
            preferred_block_size=64,
            needs_exact_host_lengths=True,
            needs_probe=probe,
        )
    return _latents(
        (_DEEPSEEK, _SMALL),
        Rule(name="nope_width", check=_nope_width),
        devices=(_HOPPER, _BLACKWELL),
        dtypes=frozenset({torch.bfloat16}),
        kv_cache_dtypes=frozenset({"auto", "fp8", "fp8_e4m3"}),
        block_sizes=(32, 64),
        preferred_block_size=32,
        fp8_products=True,
        needs_probe=probe,
    )


_NOPE_WIDTHS = (64, 128, 192)


def _nope_width(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    dims = request.mla
    if dims is None or dims.qk_nope_head_dim in _NOPE_WIDTHS:
        return None
    return Reason(
        code="mla_dims",
        value=f"qk_nope_head_dim={dims.qk_nope_head_dim}",
        allowed=", ".join(map(str, _NOPE_WIDTHS)),
    )


def cutlass_mla(device: DeviceFacts, inventory: Inventory) -> Capability:
    """CUTLASS_MLA: single query tokens of up to 128 heads on Blackwell."""

    def has_heads(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        return head_count_objection(request.num_heads, (KERNEL_HEADS,))

    return _latents(
        (_DEEPSEEK,),
        Rule(name="kernel_heads", check=has_heads),
        devices=(_BLACKWELL,),
        block_sizes=(CUTLASS_PAGE,),
        preferred_block_size=CUTLASS_PAGE,
        needs_probe=_unprobed(inventory, "vllm_cutlass_mla"),
    )


def _unprobed(inventory: Inventory, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if inventory.get(name).status is VendorStatus.PRESENT)
