"""FlashAttention 3 by its operators, which cost the host less than the functions around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attn_cuda._fa_step import Call, Extras, KeyStep, sides
from attn_shared.spec import LayerSpec

__all__ = ["call_of_3", "call_of_vllm_3"]


def call_of_3(operator: Callable[..., Any], spec: LayerSpec) -> Call:
    """Bind `flash_attn_3_gpu.fwd` to a layer, by keyword."""
    left, right = sides(spec.window, -1)
    fixed: dict[str, Any] = {
        "softmax_scale": spec.scale,
        "window_size_left": left,
        "window_size_right": right,
    }
    if spec.softcap is not None:
        fixed["softcap"] = spec.softcap

    def call(
        query: Tensor, key: Tensor, value: Tensor, step: KeyStep, extras: Extras
    ) -> tuple[Tensor, Tensor | None]:
        is_paged = step.block_table is not None
        query_descale, key_descale, value_descale = extras.descales
        output, lse, *_ = operator(
            q=query,
            k=key,
            v=value,
            out=extras.out,
            cu_seqlens_q=step.query_start_loc,
            cu_seqlens_k=None if is_paged else step.key_start_loc,
            seqused_k=step.key_lens,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=step.max_key_len,
            page_table=step.block_table,
            is_causal=step.causal,
            q_descale=query_descale,
            k_descale=key_descale,
            v_descale=value_descale,
            scheduler_metadata=step.schedule,
            num_splits=step.num_splits if is_paged else 1,
            sinks=extras.sinks,
            **fixed,
        )
        return output, lse

    return call


def call_of_vllm_3(operator: Callable[..., Any], spec: LayerSpec) -> Call:
    """Bind the operator of vLLM's build to a layer, by position: it has no defaults.

    Positions are those of `attn_cuda._vendor.vllm_flash_attn`, which compares their names.
    """
    scale, softcap = spec.scale, 0.0 if spec.softcap is None else spec.softcap
    left, right = sides(spec.window, -1)

    def call(
        query: Tensor, key: Tensor, value: Tensor, step: KeyStep, extras: Extras
    ) -> tuple[Tensor, Tensor | None]:
        output, lse, *_ = operator(
            query,
            key,
            value,
            *(None, None, None),  # new keys, new values, a second query
            extras.out,
            step.query_start_loc,
            step.key_start_loc,
            *(None, None),  # starts of new keys, rows of the query that count
            step.key_lens,
            step.max_query_len,
            step.max_key_len,
            step.block_table,
            *(None, None, None, None, None),  # rows of the cache, left padding, rotary embedding
            *extras.descales,
            scale,
            step.causal,
            left,
            right,
            softcap,
            True,  # rotary embedding interleaved
            step.schedule,
            step.num_splits,
            *(None, 0),  # pack_gqa, sm_margin
            extras.sinks,
            *(1, 0, None),  # shards of the keys
        )
        return output, lse

    return call
