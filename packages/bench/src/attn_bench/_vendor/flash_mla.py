"""FlashMLA's dense decode over latents, in pages of 64; both distributions of the module."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attn_bench.direct import DirectCalls, itself, refuse_cache_dtype
from attn_shared.errors import UnsupportedOptionError
from attn_shared.probing import import_library

if TYPE_CHECKING:
    from attn_bench.paged import PeerInputs

__all__ = ["direct"]

_PAGE_SIZE = 64


def direct(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return flash_mla_with_kvcache over each layer; it writes into a tensor of its own.

    The first call makes the schedule, which the other layers read.

    Raises:
        ImportError: with the loader's own words.
        UnsupportedOptionError: a cache or rows that its kernels do not take.
    """
    library = import_library("flash_mla")
    batch = layers[0]
    workload = batch.workload
    refuse_cache_dtype("flash_mla", workload, ("auto",))
    if batch.block_size != _PAGE_SIZE or len(set(workload.query_lens)) != 1:
        raise UnsupportedOptionError(
            f"flash_mla decodes no {workload.shape} in blocks of {batch.block_size}; allowed: "
            f"blocks of {_PAGE_SIZE}, and as many query tokens in each request."
        )
    fixed: dict[str, Any] = {
        "tile_scheduler_metadata": library.get_mla_metadata()[0],
        "causal": workload.query_len > 1,
    }
    if "use_legacy" in inspect.signature(library.flash_mla_with_kvcache).parameters:
        fixed["use_legacy"] = True
    return DirectCalls(
        calls=tuple(
            partial(library.flash_mla_with_kvcache, **_arguments(layer), **fixed)
            for layer in layers
        ),
        tokens=_tokens,
        lse=_lse if workload.returns_lse else None,
        notes=("flash_mla: it returns a tensor of its own, and an LSE with it",),
    )


def _arguments(layer: PeerInputs) -> dict[str, Any]:
    """Return the keywords of one layer's call."""
    workload = layer.workload
    return {
        "q": layer.query.view(workload.batch, workload.query_len, *layer.query.shape[1:]),
        "k_cache": layer.key_cache,
        "block_table": layer.block_table,
        "cache_seqlens": layer.seq_lens,
        "head_dim_v": layer.value_cache.shape[-1],
        "softmax_scale": layer.scale,
    }


def _tokens(result: Any) -> Tensor:
    return itself(result[0]).flatten(0, 1)


def _lse(result: Any) -> Tensor:
    """Return (Hq, T); the library's is (B, Hq, S)."""
    return itself(result[1]).transpose(0, 1).flatten(1)
