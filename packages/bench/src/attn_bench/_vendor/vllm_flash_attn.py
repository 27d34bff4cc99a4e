"""FlashAttention 2 and 3 as vLLM builds them: pages of 16, and an output that may be given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attn_bench.direct import DirectCalls, first_of, itself, refuse_cache_dtype, second_of
from attn_shared.errors import UnsupportedOptionError
from attn_shared.probing import import_library

if TYPE_CHECKING:
    from attn_bench.paged import PeerInputs

__all__ = ["direct_2", "direct_3", "direct_latents"]

_FP8 = ("fp8", "fp8_e4m3")


def direct_2(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return version 2 over each layer.

    Raises:
        ImportError: with the loader's own words.
        UnsupportedOptionError: it is not in this build, or does not read the cache.
    """
    refuse_cache_dtype("flash_attn_2_vllm", layers[0].workload, ("auto",))
    return _direct(layers, 2, None, {})


def direct_3(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return version 3 over each layer, with a schedule made ahead.

    Raises:
        ImportError: with the loader's own words.
        UnsupportedOptionError: it is not in this build, or does not read the cache.
    """
    library = import_library("vllm.vllm_flash_attn")
    batch = layers[0]
    refuse_cache_dtype("flash_attn_3_vllm", batch.workload, ("auto", *_FP8))
    plan = _plan(library, batch, headdim=batch.workload.heads.head_size)
    return _direct(layers, 3, plan, _descales(batch))


def direct_latents(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return version 3 over latents: the rope part is the key, the latent value and, by q_v, key.

    Raises:
        ImportError: with the loader's own words.
        UnsupportedOptionError: it is not in this build, or does not read the cache.
    """
    library = import_library("vllm.vllm_flash_attn")
    batch = layers[0]
    refuse_cache_dtype("flash_attn_3_vllm_mla", batch.workload, ("auto",))
    rank, width = batch.value_cache.shape[-1], batch.key_cache.shape[-1]
    plan = _plan(library, batch, headdim=width - rank, headdim_v=rank)
    return _direct(layers, 3, plan, {})


def _plan(library: Any, batch: PeerInputs, **widths: int) -> partial[torch.Tensor]:
    """Return what makes the schedule of a batch."""
    workload = batch.workload
    return partial(
        library.get_scheduler_metadata,
        batch_size=workload.batch,
        max_seqlen_q=workload.query_len,
        max_seqlen_k=workload.context,
        num_heads_q=workload.heads.num_heads,
        num_heads_kv=workload.heads.num_kv_heads,
        cache_seqlens=batch.seq_lens,
        qkv_dtype=batch.key_cache.dtype,
        cu_seqlens_q=batch.query_start_loc,
        page_size=batch.block_size,
        causal=True,
        window_size=batch.window,
        **widths,
    )


def _direct(
    layers: Sequence[PeerInputs], version: int, plan: Any, more: dict[str, Any]
) -> DirectCalls:
    library = import_library("vllm.vllm_flash_attn")
    reason = library.fa_version_unsupported_reason(version)
    if reason:
        raise UnsupportedOptionError(f"flash_attn_{version}_vllm does not run here: {reason}.")
    workload = layers[0].workload
    is_fp8 = workload.kv_cache_dtype in _FP8
    schedule = {} if plan is None else {"scheduler_metadata": plan()}
    return DirectCalls(
        calls=tuple(
            partial(
                library.flash_attn_varlen_func, **_arguments(layer, version), **schedule, **more
            )
            for layer in layers
        ),
        tokens=first_of if workload.returns_lse else itself,
        lse=second_of if workload.returns_lse else None,
        plan=plan,
        compute_dtype=torch.float8_e4m3fn if is_fp8 else None,
        notes=("flash_attn_3_vllm: its query is in fp8 before the call",) if is_fp8 else (),
    )


def _arguments(layer: PeerInputs, version: int) -> dict[str, Any]:
    """Return the keywords of one layer's call."""
    workload = layer.workload
    query = layer.query.to(layer.key_cache.dtype)
    parts: dict[str, Any] = {"q": query, "k": layer.key_cache}
    if workload.heads.is_latent:
        rank = layer.value_cache.shape[-1]
        parts = {"q": query[..., rank:], "k": layer.key_cache[..., rank:], "q_v": query[..., :rank]}
    return {
        **parts,
        "v": layer.value_cache,
        "max_seqlen_q": workload.query_len,
        "cu_seqlens_q": layer.query_start_loc,
        "max_seqlen_k": workload.context,
        "seqused_k": layer.seq_lens,
        "softmax_scale": layer.scale,
        "causal": True,
        "window_size": list(layer.window),
        "block_table": layer.block_table,
        "return_softmax_lse": workload.returns_lse,
        "out": None if workload.own_output else layer.output,
        "fa_version": version,
    }


def _descales(batch: PeerInputs) -> dict[str, torch.Tensor]:
    """Return scales (B, Hkv) float32 of ones where the cache is quantised."""
    if batch.workload.kv_cache_dtype == "auto":
        return {}
    shape = (batch.workload.batch, batch.workload.heads.num_kv_heads)
    ones = torch.ones(shape, dtype=torch.float32, device=batch.query.device)
    return dict.fromkeys(("q_descale", "k_descale", "v_descale"), ones)
