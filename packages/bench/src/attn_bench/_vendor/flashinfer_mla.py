"""FlashInfer's planned decode over latents, by its kernels for Hopper; releases up to 0.6."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_bench.direct import DirectCalls, first_of, itself, refuse_cache_dtype
from attn_shared.errors import UnsupportedOptionError
from attn_shared.probing import import_library

if TYPE_CHECKING:
    from attn_bench.paged import PeerInputs

__all__ = ["direct"]

_WORKSPACE_BYTES = 128 * 2**20


def direct(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return a wrapper's run over each layer; plans are timed on a second wrapper.

    Raises:
        ImportError: with the loader's own words.
        UnsupportedOptionError: a release that plans otherwise, or a cache that it does not read.
    """
    library = import_library("flashinfer.mla")
    batch = layers[0]
    workload = batch.workload
    refuse_cache_dtype("flashinfer_mla", workload, ("auto",))
    make = library.BatchMLAPagedAttentionWrapper
    if "metadata" in inspect.signature(make.plan).parameters:
        raise UnsupportedOptionError(
            "flashinfer_mla: this release plans from one description instead of four tensors; "
            "allowed: FlashInfer 0.6."
        )
    scratch = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=batch.query.device)
    plans = [partial(make(scratch, backend="fa3").plan, **_plan(batch)) for _ in range(2)]
    plans[0]()
    wrapper = plans[0].func.__self__  # type: ignore[attr-defined]
    return DirectCalls(
        calls=tuple(partial(wrapper.run, **_arguments(layer)) for layer in layers),
        tokens=first_of if workload.returns_lse else itself,
        lse=_natural_lse if workload.returns_lse else None,
        plan=plans[1],
    )


def _plan(batch: PeerInputs) -> dict[str, Any]:
    """Return what is planned: lengths and pages of the batch, on the host but for the pages."""
    workload, size = batch.workload, batch.block_size
    counts = [-(-length // size) for length in workload.seq_lens]
    rows = [row[:count] for row, count in zip(batch.block_table, counts, strict=True)]
    rank = batch.value_cache.shape[-1]
    return {
        "qo_indptr": batch.query_start_loc.cpu(),
        "kv_indptr": torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "kv_indices": torch.cat(rows),
        "kv_len_arr": torch.tensor(workload.seq_lens, dtype=torch.int32),
        "num_heads": workload.heads.num_heads,
        "head_dim_ckv": rank,
        "head_dim_kpe": batch.query.shape[-1] - rank,
        "page_size": size,
        "causal": workload.query_len > 1,
        "sm_scale": batch.scale,
        "q_data_type": batch.query.dtype,
        "kv_data_type": batch.key_cache.dtype,
    }


def _arguments(layer: PeerInputs) -> dict[str, Any]:
    """Return the keywords of one layer's run."""
    rank = layer.value_cache.shape[-1]
    cache = layer.key_cache.squeeze(2)
    return {
        "q_nope": layer.query[..., :rank],
        "q_pe": layer.query[..., rank:],
        "ckv_cache": cache[..., :rank],
        "kpe_cache": cache[..., rank:],
        "out": None if layer.workload.own_output else layer.output,
        "return_lse": layer.workload.returns_lse,
    }


def _natural_lse(result: Any) -> Tensor:
    """Return (Hq, T) in natural logarithm; the library's is (T, Hq) and of base 2."""
    return itself(result[1]).T * math.log(2.0)
