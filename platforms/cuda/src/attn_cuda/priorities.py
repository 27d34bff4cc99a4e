"""The default order of backends on NVIDIA GPUs."""

from __future__ import annotations

from attn_shared.platform import PriorityBand
from attn_shared.ranking import Rank

__all__ = ["PRIORITIES"]

PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="FLASH_ATTN",
        priority=PriorityBand.PERFORMANT,
        families=frozenset({"hopper"}),
        provenance="not measured on this hardware; first, because FlashAttention 3 is written for "
        "it",
    ),
    Rank(
        name="FLASH_ATTN",
        priority=PriorityBand.PERFORMANT,
        provenance="not measured on this hardware; kernels written for NVIDIA before portable ones",
    ),
    Rank(
        name="FLASH_ATTN_DIFFKV",
        priority=None,
        provenance="FLASH_ATTN under another name, which serves the same layers",
    ),
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
