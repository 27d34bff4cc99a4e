"""AITER over latents: the wheel amd-aiter 0.1.7 and its repository at e4048607a5; not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.attend import KernelCall, LseForm
from attn_conformance.stubs.checks import (
    Limits,
    check_indices,
    check_kernel_call,
    check_output,
    refuse_unless,
)
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.vendors.aiter import AITER_0_1_7, AITER_HEAD

__all__ = ["AITER_MLA_0_1_7", "AITER_MLA_HEAD"]

_NAME = "mla_decode_fwd"
_HEADS = (16, 128)
_MOST_ROWS = 4
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_LIMITS = Limits(
    dtypes=(torch.float16, torch.bfloat16, *_FP8), head_size_multiple=64, head_size_max=576
)
_BEFORE = "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, "
_AFTER = (
    "sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, "
    "work_meta_data=None, work_indptr=None, work_info_set=None, reduce_indptr=None, "
    "reduce_final_map=None, reduce_partial_map=None, q_scale=None, kv_scale=None"
)
_HEAD_ONLY = ", intra_batch_mode=False, return_logits=False, return_lse=False"


@dataclass(frozen=True, kw_only=True)
class _Decode:
    """mla_decode_fwd without work lists, which writes `o` and returns (logits, LSE or None)."""

    signature: VendorSignature

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for it; its calls go to the recorder."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.answer(recorder.record(self.signature, arguments, keywords))

        call.__name__ = call.__qualname__ = _NAME
        call.__signature__ = self.signature.signature  # type: ignore[attr-defined]
        return call

    def answer(self, arguments: Mapping[str, Any]) -> Any:
        """Refuse what the kernels do not take, and compute the rest."""
        query, cache, out = (arguments[name] for name in ("q", "kv_buffer", "o"))
        if arguments["logit_cap"] > 0:
            raise AssertionError("logit_cap is not supported yet")
        refuse_unless(cache.ndim == 4 and cache.shape[2] == 1, _NAME, "kv_buffer (P, S, 1, D)")
        page = cache.shape[1]
        refuse_unless(arguments.get("page_size", page) == page, _NAME, f"page_size is not {page}")
        heads, rows = query.shape[1], arguments["max_seqlen_q"]
        words = f"nhead={heads} and max_seqlen_q={rows} not supported"
        refuse_unless(heads in _HEADS and 1 <= rows <= _MOST_ROWS, _NAME, words)
        for name, tensor in (("q", query), ("kv_buffer", cache), ("o", out)):
            refuse_unless(tensor.is_contiguous(), _NAME, f"{name} must be contiguous")
        call = self._kernel_call(arguments, query, cache, out.shape[-1])
        check_kernel_call(_NAME, call, _LIMITS)
        expected = (*query.shape[:2], out.shape[-1])
        check_output(_NAME, "o", out, expected, torch.bfloat16 if _is_fp8(query) else query.dtype)
        result = call.attend()
        out.copy_(result.output)
        lse = call.lse(result, LseForm(layout="TH")) if arguments.get("return_lse") else None
        return torch.empty(0), lse

    def _kernel_call(
        self, arguments: Mapping[str, Any], query: Tensor, cache: Tensor, rank: int
    ) -> KernelCall:
        starts = arguments["qo_indptr"]
        check_indices(_NAME, "qo_indptr", starts, (None,))
        lens, table = _paged(arguments, len(starts) - 1, cache.shape[1])
        most = int(starts.diff().max()) if len(starts) > 1 else 0
        words = f"a request has {most} rows, max_seqlen_q is {arguments['max_seqlen_q']}"
        refuse_unless(most <= arguments["max_seqlen_q"], _NAME, words)
        scales = [_scale(arguments[name]) for name in ("q_scale", "kv_scale")]
        if not _is_fp8(query) and scales != [1.0, 1.0]:
            raise AssertionError("q_scale and kv_scale are for fp8")
        scale = arguments["sm_scale"]
        return KernelCall(
            query=query,
            key=cache,
            value=cache[..., :rank],
            query_starts=starts,
            key_lens=lens,
            block_table=table,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            is_causal=True,
            descales=(scales[0], scales[1], scales[1]),
        )


def _paged(arguments: Mapping[str, Any], count: int, page: int) -> tuple[Tensor, Tensor]:
    """Return the lengths and the block table of pages that lie in a row."""
    starts, pages, last = (
        arguments[name] for name in ("kv_indptr", "kv_indices", "kv_last_page_lens")
    )
    check_indices(_NAME, "kv_indptr", starts, (count + 1,))
    check_indices(_NAME, "kv_last_page_lens", last, (count,))
    check_indices(_NAME, "kv_indices", pages, (None,))
    refuse_unless(int(starts[-1]) <= len(pages), _NAME, "kv_indices are too few")
    counts = starts.diff()
    fits = bool(((last >= 1) & (last <= page))[counts > 0].all())
    refuse_unless(fits, _NAME, f"kv_last_page_lens must be 1 to {page}, not {last.tolist()}")
    lens = torch.where(counts > 0, (counts - 1) * page + last, 0).int()
    table = torch.zeros((count, max(1, *counts.tolist(), 0)), dtype=torch.int32)
    for row, start, some in zip(table, starts.tolist(), counts.tolist(), strict=False):
        row[:some] = pages[start : start + some]
    return lens, table


def _scale(scale: Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)


def _is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype in _FP8


def _stub(base: VendorStub, between: str, last: str) -> VendorStub:
    parameters = f"{_BEFORE}{between}{_AFTER}{last}"
    signature = VendorSignature(name=_NAME, parameters=parameters, returns="logits, LSE or None")
    decode = _Decode(signature=signature)
    return replace(base, modules={**base.modules, "aiter.mla": {_NAME: decode}})


AITER_MLA_0_1_7 = _stub(AITER_0_1_7, "", "")
"""The wheel: the LSE is not returned, and the page size is the cache's."""

AITER_MLA_HEAD = _stub(AITER_HEAD, "page_size=1, nhead_kv=1, ", _HEAD_ONLY)
"""The repository: page size and kv heads as arguments, the LSE (T, Hq) if it is asked for."""
