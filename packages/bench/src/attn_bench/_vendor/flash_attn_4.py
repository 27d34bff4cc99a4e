"""FlashAttention 4, of the distribution flash-attn-4; the first call of a shape compiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attn_bench.direct import DirectCalls, first_of, refuse_cache_dtype, second_of
from attn_shared.probing import import_library

if TYPE_CHECKING:
    from attn_bench.paged import PeerInputs

__all__ = ["direct"]


def direct(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return flash_attn_varlen_func over each layer; it writes into a tensor of its own.

    Raises:
        ImportError: with the loader's own words.
        UnsupportedOptionError: a cache in a format that it does not read.
    """
    library = import_library("flash_attn.cute")
    workload = layers[0].workload
    refuse_cache_dtype("flash_attn_4", workload, ("auto",))
    return DirectCalls(
        calls=tuple(
            partial(library.flash_attn_varlen_func, **_arguments(layer)) for layer in layers
        ),
        tokens=first_of,
        lse=second_of if workload.returns_lse else None,
    )


def _arguments(layer: PeerInputs) -> dict[str, Any]:
    """Return the keywords of one layer's call; unbounded is None here."""
    workload = layer.workload
    return {
        "q": layer.query,
        "k": layer.key_cache,
        "v": layer.value_cache,
        "cu_seqlens_q": layer.query_start_loc,
        "max_seqlen_q": workload.query_len,
        "max_seqlen_k": workload.context,
        "seqused_k": layer.seq_lens,
        "page_table": layer.block_table,
        "softmax_scale": layer.scale,
        "causal": True,
        "window_size": workload.window_sides,
        "return_lse": workload.returns_lse,
    }
