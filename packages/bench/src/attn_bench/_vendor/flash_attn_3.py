"""FlashAttention 3 through flash_attn_interface: paged calls with a schedule made ahead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attn_bench.direct import DirectCalls, first_of, itself, refuse_cache_dtype, second_of
from attn_shared.probing import import_library

if TYPE_CHECKING:
    from attn_bench.paged import PeerInputs

__all__ = ["direct"]

_FP8 = ("fp8", "fp8_e4m3")


def direct(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return flash_attn_with_kvcache over each layer; it writes into a tensor of its own.

    Raises:
        ImportError: with the loader's own words.
        UnsupportedOptionError: a cache in a format that it does not read.
    """
    interface = import_library("flash_attn_interface")
    batch = layers[0]
    workload = batch.workload
    refuse_cache_dtype("flash_attn_3", workload, ("auto", *_FP8))
    is_fp8 = workload.kv_cache_dtype in _FP8
    plan = partial(interface.get_scheduler_metadata, **_schedule_arguments(batch))
    schedule = plan()
    return DirectCalls(
        calls=tuple(
            partial(interface.flash_attn_with_kvcache, **_arguments(layer, schedule))
            for layer in layers
        ),
        tokens=first_of if workload.returns_lse else itself,
        lse=second_of if workload.returns_lse else None,
        plan=plan,
        compute_dtype=torch.float8_e4m3fn if is_fp8 else None,
        notes=("flash_attn_3: its query is in fp8 before the call",) if is_fp8 else (),
    )


def _schedule_arguments(batch: PeerInputs) -> dict[str, Any]:
    """Return what the schedule depends on, bounds as the call will see them."""
    workload, heads = batch.workload, batch.workload.heads
    return {
        "batch_size": workload.batch,
        "max_seqlen_q": workload.query_len,
        "max_seqlen_k": batch.max_seq_len,
        "num_heads_q": heads.num_heads,
        "num_heads_kv": heads.num_kv_heads,
        "headdim": heads.head_size,
        "cache_seqlens": batch.seq_lens,
        "qkv_dtype": batch.key_cache.dtype,
        "cu_seqlens_q": batch.query_start_loc,
        "page_size": batch.block_size,
        "causal": True,
        "window_size": batch.window,
    }


def _arguments(layer: PeerInputs, schedule: torch.Tensor) -> dict[str, Any]:
    """Return the keywords of one layer's call."""
    workload = layer.workload
    return {
        "q": layer.query.to(layer.key_cache.dtype),
        "k_cache": layer.key_cache,
        "v_cache": layer.value_cache,
        "cache_seqlens": layer.seq_lens,
        "page_table": layer.block_table,
        "cu_seqlens_q": layer.query_start_loc,
        "max_seqlen_q": workload.query_len,
        "softmax_scale": layer.scale,
        "causal": True,
        "window_size": layer.window,
        "scheduler_metadata": schedule,
        "return_softmax_lse": workload.returns_lse,
        **_descales(layer),
    }


def _descales(layer: PeerInputs) -> dict[str, torch.Tensor]:
    """Return scales (B, Hkv) float32 of ones where the cache is quantised."""
    if layer.workload.kv_cache_dtype == "auto":
        return {}
    shape = (layer.workload.batch, layer.workload.heads.num_kv_heads)
    ones = torch.ones(shape, dtype=torch.float32, device=layer.query.device)
    return dict.fromkeys(("q_descale", "k_descale", "v_descale"), ones)
