"""vLLM's description of a batch as attn's."""

from __future__ import annotations

from typing import Any

import torch

from attn_shared.errors import UnsupportedOptionError
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["common_of"]


def common_of(
    source: Any, *, block_size: int | None, has_exact_lengths: bool
) -> CommonAttentionMetadata:
    """Return the batch that vLLM describes.

    vLLM may count padding among the tokens; attn's count is that of the query's prefix sums, and
    rows past it are padding to both.

    Args:
        source: vLLM's CommonAttentionMetadata.
        block_size: tokens per block of the table; None for cache-free attention, whose batch has
            neither table nor slots.
        has_exact_lengths: the host's sequence lengths are exact, not an upper bound: there is no
            speculative decoding that may reject tokens behind the host's back.

    Raises:
        UnsupportedOptionError: the batch says something that attn's description has no word for.
        MetadataError: the batch contradicts itself.
    """
    if getattr(source, "rswa_prefix_lens", None) is not None:
        raise UnsupportedOptionError(
            "reference sliding windows (rswa_prefix_lens) are not served by attn's backends.",
            hint="run this model on vLLM's own backend: unset ATTN_VLLM_BACKEND.",
        )
    num_reqs = int(source.num_reqs)
    starts_cpu = source.query_start_loc_cpu[: num_reqs + 1]
    seq_lens = source.seq_lens[:num_reqs]
    seq_lens_cpu = _host_lengths(source, seq_lens)
    is_paged = block_size is not None
    causal, causal_cpu = _causality(source.causal)
    return CommonAttentionMetadata(
        query_start_loc=source.query_start_loc[: num_reqs + 1],
        query_start_loc_cpu=starts_cpu,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens_cpu,
        seq_lens_cpu_is_exact=has_exact_lengths or seq_lens.device.type == "cpu",
        num_reqs=num_reqs,
        num_actual_tokens=int(starts_cpu[-1]),
        max_query_len=int(source.max_query_len),
        max_seq_len=int(source.max_seq_len),
        block_table=source.block_table_tensor[:num_reqs] if is_paged else None,
        slot_mapping=source.slot_mapping if is_paged else None,
        block_size=block_size,
        causal=causal if is_paged else False,
        causal_cpu=causal_cpu if is_paged else None,
        is_prefilling=_first(getattr(source, "is_prefilling", None), num_reqs),
        mm_prefix_ranges=getattr(source, "mm_req_doc_ranges", None) or {},
    )


def _host_lengths(source: Any, seq_lens: torch.Tensor) -> torch.Tensor | None:
    """Return the host's sequence lengths without a synchronisation, where it has any."""
    if seq_lens.device.type == "cpu":
        return seq_lens
    bound = getattr(source, "seq_lens_cpu_upper_bound", None)
    return _first(bound, len(seq_lens))


def _first(tensor: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:count]


def _causality(causal: Any) -> tuple[bool | torch.Tensor, torch.Tensor | None]:
    """Return who is causal, and its host mirror.

    The mirror is a copy, which waits for the device; only a batch whose requests differ has one.
    """
    if isinstance(causal, torch.Tensor):
        return causal.bool(), causal.bool().cpu()
    return bool(causal), None
