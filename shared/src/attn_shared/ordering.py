"""Putting the requests of a batch in the order that a builder needs, and back.

An engine orders its own batches (`batching.reorder`) and never comes here; `Attention` does it for
a caller who has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_shared.batching import reorder
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["ordered", "permuted"]

_PER_REQUEST = (
    "seq_lens",
    "seq_lens_cpu",
    "block_table",
    "causal",
    "causal_cpu",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "is_prefilling",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
)
_PER_TOKEN = ("slot_mapping", "positions")


def ordered(
    common: CommonAttentionMetadata, decode_threshold: int
) -> tuple[CommonAttentionMetadata, torch.Tensor | None]:
    """Return the batch with its decodes first, and which query row stands where.

    Args:
        common: the batch; its host lengths must be exact.
        decode_threshold: most query tokens of a decode.

    Returns:
        The batch, and (T,) int64 on its device: row i of the ordered batch is row order[i] of
        the given one. None where nothing moved.
    """
    query_lens = common.query_lens_cpu.tolist()
    seq_lens = common.exact_seq_lens_cpu.tolist()
    computed = [seq - query for seq, query in zip(seq_lens, query_lens, strict=True)]
    is_prefilling = common.is_prefilling
    prompt = (
        computed
        if is_prefilling is None
        else [
            seq if unfinished else done
            for seq, done, unfinished in zip(
                seq_lens, computed, is_prefilling.tolist(), strict=True
            )
        ]
    )
    result = reorder(query_lens, computed, prompt, decode_threshold)
    if not result.changed:
        return common, None
    return permuted(common, result.order)


def permuted(
    common: CommonAttentionMetadata, order: Sequence[int]
) -> tuple[CommonAttentionMetadata, torch.Tensor]:
    """Return the batch with request order[i] in place i, and the order of its query rows.

    Every field moves with its request; none is dropped. The slots of cross-attention belong to
    encoder tokens, which stay where they are.
    """
    index = torch.tensor(order, dtype=torch.int64)
    starts = common.query_start_loc_cpu.tolist()
    rows = [row for b in order for row in range(starts[b], starts[b + 1])]
    token_order = torch.tensor(rows, dtype=torch.int64)
    changes: dict[str, Any] = {}
    is_cross = common.encoder_seq_lens is not None
    for name in (*_PER_REQUEST, *_PER_TOKEN):
        value = getattr(common, name)
        if isinstance(value, torch.Tensor) and not (is_cross and name == "slot_mapping"):
            moved = index if name in _PER_REQUEST else token_order
            changes[name] = value[moved.to(value.device)]
    for name in ("query_start_loc", "key_start_loc"):
        changes.update(_moved_offsets(common, name, index))
    changes["mm_prefix_ranges"] = {
        place: common.mm_prefix_ranges[b]
        for place, b in enumerate(order)
        if b in common.mm_prefix_ranges
    }
    return common.with_fields(**changes), token_order.to(common.query_start_loc.device)


def _moved_offsets(
    common: CommonAttentionMetadata, name: str, index: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the prefix sums of the moved lengths, on the device and the host."""
    on_host = getattr(common, f"{name}_cpu")
    if on_host is None:
        return {}
    moved = torch.zeros_like(on_host)
    moved[1:] = on_host.diff()[index].cumsum(0)
    return {f"{name}_cpu": moved, name: moved.to(getattr(common, name).device)}
