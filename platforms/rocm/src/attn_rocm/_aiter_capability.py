"""What AITER's kernels can do: those of composable kernels and assembly, and those in Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_rocm._aiter_build import DEVICES, LIBRARY, build_in, missing_call
from attn_shared.capability import Capability, Exactly, Reason, Rule, SizeSet, Support
from attn_shared.device import DeviceFacts
from attn_shared.dtypes import KVCacheLayout
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.request import AttentionRequest, AttentionType

__all__ = [
    "FLASH",
    "MOST_QUERIES_PER_KV",
    "PAGED_HEAD_SIZE",
    "UNIFIED",
    "decodes_by_pages",
    "flash_capability",
    "unified_capability",
]

FLASH = "ROCM_AITER_FA"
UNIFIED = "ROCM_AITER_UNIFIED_ATTN"

MOST_QUERIES_PER_KV = 16
"""Query heads of a kv head that the decode kernel takes: the rows of one matrix instruction."""

PAGED_HEAD_SIZE = 128
"""The largest head that the paged prefill has kernels for; larger ones are gathered first."""

_HALVES = frozenset({torch.float16, torch.bfloat16})
_E4M3 = frozenset({"fp8", "fp8_e4m3"})
_TILES = (16, 32, 64, 128)  # of ROCM_AITER_UNIFIED_ATTN: one block is a tile, a power of two

_Check = Callable[[AttentionRequest, DeviceFacts], Reason | None]


def decodes_by_pages(request: AttentionRequest) -> bool:
    """Whether decodes run on `paged_attention_v1`, and not on the prefill kernel.

    It has neither sinks nor an LSE, and with windows wrong numbers have been reported
    (vllm-project/vllm#34570).
    """
    return (
        request.queries_per_kv <= MOST_QUERIES_PER_KV
        and not request.is_cache_free
        and not request.has_sinks
        and not request.has_window
        and not request.needs_lse
    )


def flash_capability(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return what ROCM_AITER_FA can do with the release that is installed."""
    build = build_in(inventory)
    calls = ("flash_attn_varlen_func", "mha_batch_prefill_func", "paged_attention_v1")

    def has_calls(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        return missing_call(build, calls)

    return Capability(
        devices=DEVICES,
        dtypes=_HALVES,
        head_sizes=SizeSet.of(64, 128, 256),
        kv_cache_dtypes=frozenset({"auto"}) | _E4M3,
        block_sizes=(16,),
        max_block_size=32,
        attn_types=frozenset(AttentionType),
        kv_layouts=(KVCacheLayout.NHD,),
        sinks=Support.SLOW if build.has_sinks else Support.NO,
        window=Support.SLOW,
        two_sided_window=Support.SLOW,
        softcap=Support.YES,
        alibi=Support.YES,
        non_causal=Support.YES,
        kv_connector=Support.YES,
        lse=Support.SLOW,
        rules=(
            *_rules(aiter_calls=has_calls, alibi=_alibi_alone, softcap=_softcap_without_bias),
            *_rules(lse=_lse_of_exact_logits, kv_cache_dtype=_fp8_decodes_by_pages),
            *_rules(window=_window_of_more_than_a_key),
        ),
        needs_probe=_unprobed(inventory),
    )


def unified_capability(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return what ROCM_AITER_UNIFIED_ATTN can do with the release that is installed."""
    build = build_in(inventory)

    def has_call(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        return missing_call(build, ("unified_attention",))

    return Capability(
        devices=DEVICES,
        dtypes=_HALVES,
        head_sizes=SizeSet(minimum=32, maximum=256, multiple_of=8),
        kv_cache_dtypes=frozenset({"auto"}) | _E4M3,
        block_sizes=tuple(map(Exactly, _TILES)),
        preferred_block_size=64,
        kv_layouts=(KVCacheLayout.NHD, KVCacheLayout.HND),
        sinks=Support.YES,
        window=Support.YES,
        alibi=Support.YES,
        kv_connector=Support.YES,
        rules=_rules(aiter_calls=has_call, alibi=_alibi_alone),
        needs_probe=_unprobed(inventory),
    )


def _rules(**checks: _Check) -> tuple[Rule, ...]:
    return tuple(Rule(name=name, check=check) for name, check in checks.items())


def _unprobed(inventory: Inventory) -> tuple[str, ...]:
    is_unknown = inventory.get(LIBRARY).status is VendorStatus.PRESENT
    return (LIBRARY,) if is_unknown else ()


def _alibi_alone(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Refuse ALiBi beside sinks: the kernels shift the bias by row, and a sink with it."""
    if not (request.has_alibi and request.has_sinks):
        return None
    return Reason(code="alibi", value="True", allowed="False with sinks")


def _softcap_without_bias(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Refuse a cap beside ALiBi: its kernels are built for one of them."""
    if request.softcap is None or not request.has_alibi:
        return None
    return Reason(code="softcap", value=str(request.softcap), allowed="None with ALiBi")


def _window_of_more_than_a_key(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Refuse a left side of 0: a call that has no positive side runs without any window."""
    if request.window[0] != 0:
        return None
    return Reason(code="window", value=str(request.window), allowed="a left side of None or >= 1")


def _lse_of_exact_logits(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    if request.softcap is None or not request.needs_lse:
        return None
    return Reason(
        code="lse", value="True", allowed="False with softcap, whose tanh its kernels approximate"
    )


def _fp8_decodes_by_pages(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Its prefill has no fp8 keys beside a 16-bit query, so that those are read by decodes alone.

    Prompts widen what they read of the cache. For single queries `flash_attn_varlen_func`, which
    then runs, has been reported to give wrong numbers (ROCm/aiter#2229).
    """
    if request.kv_cache_dtype not in _E4M3:
        return None
    if request.attn_type is AttentionType.DECODER and decodes_by_pages(request):
        return None
    return Reason(
        code="kv_cache_dtype",
        value=request.kv_cache_dtype,
        allowed="auto; fp8 in decoders without window, sinks and LSE, of at most "
        f"{MOST_QUERIES_PER_KV} query heads per kv head",
    )
