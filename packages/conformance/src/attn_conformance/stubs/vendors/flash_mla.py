"""FlashMLA: the module flash_mla of two distributions, by what their wheels hold.

tokenspeed-flashmla 1.0.0.post20260429 was read from its wheel and run on an H200; sgl-flash-mla
1.0.0 was read from its wheel and not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.attend import LseForm, NotComputedError
from attn_conformance.stubs.checks import Limits, refuse_unless
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.opaque import OpaqueFunction
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = ["SGL_FLASH_MLA", "TOKENSPEED_FLASH_MLA"]

Arguments = Mapping[str, Any]

_NAME = "flash_mla_with_kvcache"
_PAGE = 64
_SHARED = (
    "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, "
    "num_splits=None, softmax_scale=None, causal=False, {}, indices=None, attn_sink=None, "
    "extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None"
)
_TOKENSPEED = _SHARED.format("is_fp8_kvcache=False")
_SGL = (
    f"{_SHARED.format('is_fp8_kvcache=None')}, enable_batch_invariant=False, use_legacy=False, "
    "kv_format=None, descale_q=None, descale_k=None"
)
_SPARSE = "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None{}"  # returns three
_METADATA = (
    "seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, topk=None, "
    "use_legacy=False"
)


@dataclass(slots=True, eq=False)
class FlashMLASchedMeta:
    """What the first call of a step fills and the others read."""

    have_initialized: bool = False
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None
    seen: dict[str, Any] = field(default_factory=dict)


def _schedule(arguments: Arguments) -> None:
    """Hold a call to the schedule that an earlier one has made.

    The library compares sizes and flags, and takes lengths of other values without a word; here
    they are refused too.
    """
    meta, query, cache = (arguments[n] for n in ("tile_scheduler_metadata", "q", "k_cache"))
    if not isinstance(meta, FlashMLASchedMeta):
        raise AssertionError("tile_scheduler_metadata must be of type FlashMLASchedMeta")
    if arguments["num_splits"] is not None:
        raise AssertionError("num_splits must be None")
    sizes = {
        "b, s_q, h_q": tuple(query.shape[:3]),
        "page_block_size, h_k": tuple(cache.shape[1:3]),
        "causal": arguments["causal"],
        "is_fp8_kvcache": bool(arguments["is_fp8_kvcache"]),
    }
    if not meta.have_initialized:
        meta.have_initialized = True
        meta.seen = {**sizes, "cache_seqlens": arguments["cache_seqlens"].clone()}
        return
    for name, value in sizes.items():
        if meta.seen[name] != value:
            raise AssertionError(f"sched_meta.config.{name} must be equal to {value}")
    same = torch.equal(meta.seen["cache_seqlens"], arguments["cache_seqlens"])
    refuse_unless(same, _NAME, "cache_seqlens are not those that the schedule was made for")


def _dense(arguments: Arguments) -> None:
    """Refuse what the kernel of dense decodes refuses, and what other kernels are for."""
    if arguments["indices"] is not None:
        raise NotComputedError(f"{_NAME}: sparse attention is not computed by the stub")
    query, cache = arguments["q"], arguments["k_cache"]
    for name, tensor in (("q", query), ("kcache", cache)):
        words = f"{name} must have 4 dimensions, not {tensor.ndim}"
        refuse_unless(tensor.ndim == 4, _NAME, words)
    refuse_unless(len(query) > 0, _NAME, "batch size must be positive")
    refuse_unless(query.shape[-1] in (576, 512), _NAME, "Only head_size_k == 576 or 512")
    refuse_unless(arguments["head_dim_v"] == 512, _NAME, "Only head_size_v == 512")
    refuse_unless(cache.shape[1] == _PAGE, _NAME, "Currently page_block_size must be 64")
    query.view(*query.shape[:2], 1, *query.shape[2:])  # the kernel takes a view, not a copy


def _legacy(arguments: Arguments) -> None:
    if not arguments["use_legacy"]:
        raise AssertionError("dense decoding is only supported with use_legacy=True")
    is_fp8 = arguments["k_cache"].dtype is torch.float8_e4m3fn
    if bool(arguments["is_fp8_kvcache"]) is not is_fp8:
        raise AssertionError(f"is_fp8_kvcache must be {is_fp8} with {arguments['k_cache'].dtype}")
    has_schedule = arguments["tile_scheduler_metadata"].tile_scheduler_metadata is not None
    words = "dense fp8 needs the schedule of get_mla_decoding_metadata"
    refuse_unless(has_schedule or not is_fp8, _NAME, words)
    for name in ("descale_q", "descale_k"):
        scale = arguments[name]
        fits = scale is None or (scale.dtype is torch.float32 and tuple(scale.shape) == (1,))
        refuse_unless(fits, _NAME, f"{name} must be float32 (1,)")
        refuse_unless(scale is None or is_fp8, _NAME, f"{name} is for fp8")


_ROLES = Roles(
    key="k_cache",
    value="",
    value_size="head_dim_v",
    query_starts="",
    max_query_len="",
    key_lens="cache_seqlens",
    table="block_table",
    window="",
    softcap="",
)
_ROLES_WITH_FP8 = replace(
    _ROLES, query_descale="descale_q", key_descale="descale_k", value_descale="descale_k"
)

_TUNING = frozenset({"tile_scheduler_metadata", "is_fp8_kvcache", "use_legacy"})
_LSE = LseForm(keyless=math.inf)


def _decode(
    parameters: str, roles: Roles, limits: Limits, *rules: Callable[[Arguments], None]
) -> VarlenFunction:
    return VarlenFunction(
        signature=VendorSignature(
            name=_NAME, parameters=parameters, returns="out (B, Sq, Hq, 512), LSE (B, Hq, Sq)"
        ),
        roles=roles,
        limits=limits,
        lse=_LSE,
        tuning=_TUNING,
        plain=("output", "lse"),
        needs_positive_scale=True,
        rules=(_dense, *rules, _schedule),
    )


def _not_computed(arguments: Arguments) -> None:
    raise NotComputedError("sparse prefill is not computed by the stub")


def _sparse(more: str) -> OpaqueFunction:
    return OpaqueFunction(
        signature=VendorSignature(
            name="flash_mla_sparse_fwd",
            parameters=_SPARSE.format(more),
            returns="out, largest logits, LSE",
        ),
        answer=_not_computed,
    )


def _empty_schedule() -> OpaqueFunction:
    return OpaqueFunction(
        signature=VendorSignature(
            name="get_mla_metadata", parameters="*args, **kwargs", returns="FlashMLASchedMeta, None"
        ),
        answer=lambda arguments: (FlashMLASchedMeta(), None),
    )


_DECODING_METADATA = OpaqueFunction(
    signature=VendorSignature(
        name="get_mla_decoding_metadata",
        parameters=_METADATA,
        returns="int32 (parts, 8) and (B + 1,), read by the kernel alone",
    ),
    answer=lambda arguments: (
        torch.zeros((132, 8), dtype=torch.int32),
        torch.zeros(len(arguments["seqlens_k"]) + 1, dtype=torch.int32),
    ),
)

_HALVES = Limits(head_size_multiple=64, head_size_max=576, page_multiple=_PAGE)
_WITH_FP8 = Limits(
    dtypes=(torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    head_size_multiple=64,
    head_size_max=576,
    page_multiple=_PAGE,
)

TOKENSPEED_FLASH_MLA = VendorStub(
    distribution="tokenspeed-flashmla",
    version="1.0.0.post20260429",
    modules={
        "flash_mla": {
            _NAME: _decode(_TOKENSPEED, _ROLES, _HALVES),
            "flash_mla_sparse_fwd": _sparse(""),
            "get_mla_metadata": _empty_schedule(),
        }
    },
)
"""The build for Hopper: dense decodes of 16-bit caches in pages of 64."""

SGL_FLASH_MLA = VendorStub(
    distribution="sgl-flash-mla",
    version="1.0.0",
    modules={
        "flash_mla": {
            _NAME: _decode(
                _SGL,
                _ROLES_WITH_FP8,
                _WITH_FP8,
                _legacy,
            ),
            "flash_mla_sparse_fwd": _sparse(", use_legacy=False, return_log2_lse=None"),
            "get_mla_metadata": _empty_schedule(),
            "get_mla_decoding_metadata": _DECODING_METADATA,
            "has_legacy": lambda: True,
        }
    },
)
"""The build with kernels for Blackwell, whose dense decodes are a second, older set for Hopper."""
