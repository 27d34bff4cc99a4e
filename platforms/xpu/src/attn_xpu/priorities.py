"""The default order of backends on Intel GPUs."""

from __future__ import annotations

from attn_shared.platform import PriorityBand
from attn_shared.ranking import Rank

__all__ = ["PRIORITIES"]

PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="TRITON_ATTN",
        priority=PriorityBand.PERFORMANT - 50,
        provenance="not measured on this hardware; before the backends on torch alone because its "
        "kernels read blocks where they are, and behind the vendors' own",
    ),
    Rank(
        name="TORCH_SDPA",
        priority=PriorityBand.PORTABLE,
        provenance="not measured on this hardware; before FLEX_ATTENTION because it serves more "
        "of the contract and compiles nothing",
    ),
    Rank(
        name="FLEX_ATTENTION",
        priority=PriorityBand.PORTABLE - 10,
        provenance="not measured on this hardware; after TORCH_SDPA because it compiles a kernel "
        "per kind of shape",
    ),
)
"""Rows for `attn_shared.ranking.rank`; a row may name families, architectures and phases."""
