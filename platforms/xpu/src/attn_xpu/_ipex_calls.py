"""The calls of intel-extension-for-pytorch 2.8, which write to an output and return no LSE.

Its two builds have one Python interface over two conventions. On a CPU keys lie (blocks, kv heads,
block, width), single queries have a call of their own, whose window counts the query's own key, and
keys without a cache a third, which leaves the scale out. On a GPU keys lie (blocks, block, kv
heads, width) and one call serves all steps over a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.kv_cache import AttentionSpec
from attn_shared.kv_write import check_write, write_kv
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec
from attn_xpu._ipex_capability import Build
from attn_xpu._vendor import ipex

__all__ = ["IpexStep", "LayerCalls", "writer"]

_LARGEST_GROUP = 16  # query heads to a kv head for which the call for single queries has room
_INT32_LIMIT = 2**31


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IpexStep:
    """Queries and keys of one step, as all its layers share them.

    Attributes:
        query_start_loc: (B + 1,) int32.
        key_start_loc: (B + 1,) int32: prefix sums of key lengths.
        key_lens: (B,) int32, at least 1 each.
        max_query_len: host bound.
        max_key_len: host bound.
        causal: bottom-right aligned.
        is_single: every request has one query.
        block_table: (B, M) int32, dense; None for keys that come with the call.
    """

    query_start_loc: Tensor
    key_start_loc: Tensor
    key_lens: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
    is_single: bool
    block_table: Tensor | None = None


class LayerCalls:
    """One layer's calls, with what never changes bound."""

    def __init__(self, spec: LayerSpec, build: Build) -> None:
        """Bind the library's classes.

        Raises:
            ImportError: the library does not load, in its own words.
        """
        modules = ipex.interface()
        self._paged, self._varlen = modules.PagedAttention, modules.VarlenAttention
        self._scale = Scale(spec.scale)  # it masks before it scales
        self._usual_scale = spec.head_size**-0.5
        self._is_cpu = build.name == "cpu"
        left, right = (-1 if side is None else side for side in spec.window)
        self._sides = (left, right)
        self._softcap = -1.0 if spec.softcap is None else spec.softcap
        is_both = left >= 0 and spec.softcap is not None  # a window and a softcap: it refuses that
        is_roomy = spec.queries_per_kv <= _LARGEST_GROUP
        self._has_single = self._is_cpu and is_roomy and not is_both
        heads = torch.arange(spec.num_kv_heads, dtype=torch.int32)
        self._head_mapping = heads.repeat_interleave(spec.queries_per_kv)

    def run(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, step: IpexStep) -> None:
        """Write the output (T, Hq, D); keys are (blocks, block, Hkv, D), or (Tk, Hkv, D)."""
        query = self._scale.signed(query)
        if step.block_table is None:
            self._run_varlen(query, key, value, out, step)
            return
        if self._is_cpu:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        if step.is_single and self._has_single:
            self._run_single(query, key, value, out, step, step.block_table)
            return
        self._paged.flash_attn_varlen_func(
            output=out,
            query=query,
            key_cache=key,
            value_cache=value,
            cu_seqlens_q=step.query_start_loc,
            cu_seqlens_kv=step.key_start_loc,
            max_seqlen_q=step.max_query_len,
            max_seqlen_kv=step.max_key_len,
            scale=self._scale.value,
            is_cusal=step.causal,
            block_tables=step.block_table,
            alibi_slopes=None,
            window_size_left=self._sides[0],
            window_size_right=self._sides[1],
            softcap=self._softcap,
        )

    def _run_single(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, step: IpexStep, table: Tensor
    ) -> None:
        left = self._sides[0]
        self._paged.single_query_cached_kv_attention(
            output=out,
            query=query,
            key_cache=key,
            value_cache=value,
            head_mapping=self._head_mapping,
            scale=self._scale.value,
            block_tables=table,
            context_lens=step.key_lens,
            block_size=key.shape[2],
            max_context_len=step.max_key_len,
            alibi_slopes=None,
            window_size=-1 if left < 0 else left + 1,  # counts the query's own key
            softcap=self._softcap,
        )

    def _run_varlen(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, step: IpexStep
    ) -> None:
        scale = self._scale.value
        if self._is_cpu and scale != self._usual_scale:  # which it takes whatever it is told
            query = query * (scale / self._usual_scale)
        self._varlen.apply_function(
            query=query,
            key=key,
            value=value,
            out=out,
            seqlen_q=step.query_start_loc,
            seqlen_k=step.key_start_loc,
            alibi_slopes=None,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=step.max_key_len,
            pdropout=0.0,
            softmax_scale=scale,
            zero_tensors=False,
            is_causal=False,
            return_softmax=False,
            gen_=None,
            window_size_left=-1,
            window_size_right=-1,
            softcap=-1.0,
        )


def write_by_library(
    kv_cache: Tensor,
    spec: AttentionSpec,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> None:
    """Write keys and values by the library's CPU build; see `attn_shared.kv_write.write_kv`.

    It takes slots of 32 bits, and writes before the cache for a slot of -1: rows without a slot are
    left out, and caches with more slots are written with torch.
    """
    views = check_write(kv_cache, spec, key, value, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    if len(views.key) * spec.block_size >= _INT32_LIMIT:
        write_kv(kv_cache, spec, key, value, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        return
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    if not len(rows):
        return
    ipex.interface().PagedAttention.reshape_and_cache(
        key=key[rows].contiguous(),
        value=value[rows].contiguous(),
        key_cache=views.key.transpose(1, 2),
        value_cache=views.value.transpose(1, 2),
        slot_mapping=slot_mapping[rows].int(),
    )


def writer(build: Build) -> Callable[..., None]:
    """Return what writes a cache: the library on a CPU, torch on a GPU.

    On a GPU to leave out rows would wait for the device, and a crash of its writer is on record
    (huggingface/optimum-intel#1288).
    """
    return write_by_library if build.name == "cpu" else write_kv
