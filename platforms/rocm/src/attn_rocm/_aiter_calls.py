"""AITER's calls, by keyword: our arguments in, each release's own out.

The wheel 0.1.7 and the repository's head differ: the one takes two window sizes where the other
takes three, has no sinks, and its paged prefill reads a token's place where the head reads a block
table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attn_rocm._aiter_build import AiterBuild
from attn_rocm._aiter_scales import Scales
from attn_rocm._aiter_steps import DecodeStep, PromptStep, places_of
from attn_rocm._vendor import aiter
from attn_shared.dtypes import KVCacheLayout
from attn_shared.request import Window
from attn_shared.spec import LayerSpec

__all__ = ["PAGE_SIZE", "PARTITION", "AiterCalls", "Extras", "workspace_bytes"]

PARTITION = 256
"""Keys of a partial result of `paged_attention_v1`."""

PAGE_SIZE = 16
"""Tokens of a page that the paged prefill reads by a block table; others it has no kernel for."""

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extras:
    """What a call has beside tensors and lengths.

    Attributes:
        with_lse: the LSE is wanted.
        sinks: (Hq,) float32.
        slopes: (Hq,) float32.
    """

    with_lse: bool = False
    sinks: Tensor | None = None
    slopes: Tensor | None = None


def workspace_bytes(layer: LayerSpec, num_reqs: int, max_key_len: int) -> int:
    """Return what `paged_attention_v1` wants: per part and head a row, its sum and its maximum."""
    parts = num_reqs * layer.num_heads * -(-max_key_len // PARTITION)
    return parts * (layer.head_size * layer.dtype.itemsize + 2 * _FLOAT_BYTES)


class AiterCalls:
    """The calls of one layer.

    Args:
        spec: of the layer, whose scale is positive.
        build: the release.

    Raises:
        ImportError: the library does not load, or lacks a call.
    """

    def __init__(self, spec: LayerSpec, build: AiterBuild) -> None:
        self._spec = spec
        self._build = build
        self._varlen = aiter.call("flash_attn_varlen_func")
        self._batch_prefill = aiter.call("mha_batch_prefill_func")
        self._paged_decode = aiter.call("paged_attention_v1")
        self._cap = spec.softcap or 0.0  # their word for none
        self._scales = Scales()

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        step: DecodeStep,
        scales: tuple[Tensor, Tensor] | None,
        slopes: Tensor | None,
    ) -> None:
        """Attend by single queries.

        Args:
            query: (n, Hq, D), its heads one after the other.
            key: (P, S, Hkv, D).
            value: the same, of the same strides.
            out: (n, Hq, D), contiguous.
            step: the requests.
            scales: of stored keys and values, float32 (1,) each; None without fp8.
            slopes: (Hq,) float32.
        """
        one = self._scales.of(1.0, query.device)  # its call wants a scale of any cache
        k_scale, v_scale = scales or (one, one)
        self._paged_decode(
            out=out,
            workspace_buffer=step.workspace,
            query=query,
            key_cache=key,
            value_cache=value,
            scale=self._spec.scale,
            block_tables=step.block_table,
            cu_query_lens=None,
            context_lens=step.key_lens,
            max_context_len=step.max_key_len,
            alibi_slopes=slopes,
            kv_cache_dtype="auto" if scales is None else "fp8",
            kv_cache_layout=str(KVCacheLayout.NHD),
            logits_soft_cap=self._cap,
            k_scale=k_scale,
            v_scale=v_scale,
            partition_size=PARTITION,
        )

    def varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        step: PromptStep,
        key_start_loc: Tensor,
        extras: Extras,
    ) -> Tensor | None:
        """Attend over keys that lie in rows (Tk, Hkv, D), and return the LSE (Hq, T) if wanted."""
        left, right = self._window(step, extras, is_by_rows=True)
        window = (left, right, 0)[: self._build.window_length]
        result = self._varlen(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=step.query_start_loc,
            cu_seqlens_k=key_start_loc,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=step.max_key_len,
            softmax_scale=self._spec.scale,
            logits_soft_cap=self._cap,
            causal=step.causal,
            window_size=window,
            alibi_slopes=extras.slopes,
            return_lse=extras.with_lse,
            out=out,
            **self._sinks(extras),
        )
        return result[1] if extras.with_lse else None

    def paged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        step: PromptStep,
        extras: Extras,
    ) -> Tensor | None:
        """Attend over pages (P, S, Hkv, D), and return the LSE (Hq, T) if wanted."""
        if self.reads_table_of(key):
            pages = self._tables(step)
        else:
            pages = self._tokens(step, key)
            key, value = _by_token(key), _by_token(value)
        result = self._batch_prefill(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=step.max_key_len,
            softmax_scale=self._spec.scale,
            logits_soft_cap=self._cap,
            causal=step.causal,
            window_size=self._window(step, extras, is_by_rows=False),
            alibi_slopes=extras.slopes,
            return_lse=extras.with_lse,
            out=out,
            **pages,
            **self._sinks(extras),
        )
        return result[1] if extras.with_lse else None

    def reads_table_of(self, view: Tensor) -> bool:
        """Whether pages (P, S, Hkv, D) are read by a block table, and not token by token."""
        return self._build.reads_tables and view.shape[1] == PAGE_SIZE

    def _window(self, step: PromptStep, extras: Extras, *, is_by_rows: bool) -> tuple[int, int]:
        """Return the two sides as AITER writes them.

        A window over all keys hides none, and keeps two things right. Without one, causal rows add
        slope * j for ALiBi, whose LSE is off by slope * i (ck_tile, alibi.hpp). And over rows a
        call without a window may go to machine code that has no softcap (amd-aiter 0.1.7), no
        sinks (its repository at e4048607a5) and no bound of 0 to the right: aiter/ops/mha.py asks
        for a positive side before it takes the other kernels.
        """
        left, right = _sides(self._spec.window)
        if left >= 0 or right > 0:
            return left, right
        is_by_column = extras.with_lse and extras.slopes is not None and step.causal
        is_dropped = extras.sinks is not None or self._cap > 0 or (right == 0 and not step.causal)
        if is_by_column or (is_by_rows and is_dropped):
            return step.max_key_len - 1, 0 if step.causal else right
        return left, right

    def _sinks(self, extras: Extras) -> dict[str, Any]:
        """Return the argument where there are sinks, so that a release without it is not asked."""
        return {} if extras.sinks is None else {"sink_ptr": extras.sinks}

    @staticmethod
    def _tables(step: PromptStep) -> dict[str, Any]:
        """Return a block table; the places that it stands for must be there, and are not read."""
        return {
            "kv_indptr": step.query_start_loc,
            "kv_page_indices": step.key_lens,
            "block_table": step.block_table,
            "seqlen_k": step.key_lens,
        }

    @staticmethod
    def _tokens(step: PromptStep, key: Tensor) -> dict[str, Any]:
        """Return the place of each token, the cache seen as pages of one token."""
        places = places_of(step, key.shape[1])
        return {
            "kv_indptr": places.starts,
            "kv_page_indices": places.page_indices(key.stride(0) // key.stride(1)),
        }


def _sides(window: Window) -> tuple[int, int]:
    left, right = window
    return (-1 if left is None else left, -1 if right is None else right)


def _by_token(view: Tensor) -> Tensor:
    """Return pages (P, S, Hkv, D) as rows (Hkv, D), one for each token from first to last.

    Tokens of the other half, and what pads blocks, are rows that no place names.
    """
    step = view.stride(0) // view.stride(1)
    num_rows = (view.shape[0] - 1) * step + view.shape[1]
    return view.as_strided((num_rows, *view.shape[2:]), (view.stride(1), *view.stride()[2:]))
