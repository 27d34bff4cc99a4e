"""AITER: the wheel amd-aiter 0.1.7 and its repository at e4048607a5. No kernel of it was run.

Signatures, limits and faults were read from aiter/ops/mha.py, aiter/ops/attention.py,
aiter/ops/triton, csrc/py_itfs_ck and csrc/cpp_itfs/pa of these two releases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attn_conformance.stubs.checks import Limits, refuse_unless
from attn_conformance.stubs.modules import Computed, VendorStub
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction
from attn_conformance.stubs.vendors._aiter_decode import PagedDecode
from attn_conformance.stubs.vendors._aiter_rows import batch_prefill, varlen

__all__ = ["AITER_0_1_7", "AITER_HEAD"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def _is_causal(arguments: Mapping[str, Any]) -> None:
    """Its kernel knows nothing else, and asserts it."""
    if not arguments["causal"]:
        raise AssertionError("only causal attention is supported")


def _no_query_descale(arguments: Mapping[str, Any]) -> None:
    if arguments["q_descale"] is not None:
        raise AssertionError("q_descale is not supported")


def _block_is_a_tile(arguments: Mapping[str, Any]) -> None:
    """A decode's tile is one block, and Triton's tiles are powers of two."""
    size = arguments["k"].shape[1]
    refuse_unless(size & (size - 1) == 0, "unified_attention (stub)", f"a tile of {size}")


def _left_window(arguments: Mapping[str, Any]) -> None:
    """The right side is never looked at, so that only what a causal row does not see is right."""
    right = arguments["window_size"][1]
    refuse_unless(right in (0, -1), "unified_attention (stub)", f"the window's right is {right}")


@dataclass(frozen=True, kw_only=True)
class _Unified(VarlenFunction):
    """unified_attention, whose merge of parts divides by a request's number of keys."""

    def answer(self, arguments: Mapping[str, Any]) -> Any:
        """Answer as the real function does: rows of requests without keys are NaN."""
        result = super().answer(arguments)
        starts = arguments["cu_seqlens_q"].tolist()
        for index, length in enumerate(arguments["seqused_k"].tolist()):
            if length < 1:
                arguments["out"][starts[index] : starts[index + 1]] = torch.nan
        return result


def _unified(middle: str, last: str, *rules: Callable[[Mapping[str, Any]], None]) -> VarlenFunction:
    """Return unified_attention; the repository's has two more groups of parameters."""
    return _Unified(
        signature=VendorSignature(
            name="unified_attention",
            parameters=(
                "q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, "
                "softmax_scale, causal, window_size, block_table, softcap, q_descale, "
                f"k_descale, v_descale{middle}, alibi_slopes=None, output_scale=None, "
                f"qq_bias=None, sinks=None{last}"
            ),
            returns="nothing",
        ),
        roles=Roles(
            out="out",
            key_lens="seqused_k",
            table="block_table",
            max_key_len="max_seqlen_k",
            alibi="alibi_slopes",
            sinks="sinks",
            query_descale="q_descale",
            key_descale="k_descale",
            value_descale="v_descale",
        ),
        limits=Limits(cache_dtypes=_FP8, head_size_multiple=1, head_size_max=512),
        plain=(),
        rules=(_is_causal, _left_window, _block_is_a_tile, *rules),
    )


def _stub(
    version: str, calls: Mapping[str, Computed], triton: Mapping[str, object], decode: PagedDecode
) -> VendorStub:
    modules: dict[str, Mapping[str, object]] = {
        "aiter": {**calls, "paged_attention_v1": decode},
        "aiter.ops.mha": calls,
        "aiter.ops.attention": {"paged_attention_v1": decode},
    }
    for name, function in triton.items():
        modules[name] = {"unified_attention": function}
    return VendorStub(distribution="amd-aiter", version=version, modules=modules)


AITER_0_1_7 = _stub(
    "0.1.7.post2.dev18",
    {
        "flash_attn_varlen_func": varlen("(-1, -1)", "", {"logits_soft_cap": 0.0}),
        "mha_batch_prefill_func": batch_prefill(""),
    },
    {"aiter.ops.triton.unified_attention": _unified("", "", _no_query_descale)},
    PagedDecode(has_keyless=False),
)
"""amd-aiter 0.1.7.post2.dev18, the wheel."""

_UNIFIED_HEAD = _unified(", q_scales=None", ", shuffled_kv_cache=False, skip_reduce=False")

AITER_HEAD = _stub(
    "0.2.0.dev1",
    {
        "flash_attn_varlen_func": varlen("(-1, -1, 0)", ", sink_ptr=None", {"sink_ptr": None}),
        "mha_batch_prefill_func": batch_prefill(
            ", kv_last_page_lens=None, block_table=None, seqlen_k=None, q_descale=None, "
            "k_descale=None, v_descale=None, kv_block_descale=None, sink_ptr=None, sink_size=0"
        ),
    },
    {
        "aiter.ops.triton.attention.unified_attention": _UNIFIED_HEAD,
        "aiter.ops.triton.unified_attention": _UNIFIED_HEAD,
    },
    PagedDecode(has_keyless=True),
)
"""AITER's repository at e4048607a5: sinks, a third window size, another place for Triton's."""
