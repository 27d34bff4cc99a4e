"""The default order of backends on Intel GPUs."""

from __future__ import annotations

from attn_shared.platform import PriorityBand
from attn_shared.ranking import Rank

__all__ = ["MLA_PREFILL_PRIORITIES", "MLA_PRIORITIES", "PRIORITIES"]

PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="XPU_FLASH_ATTN",
        priority=PriorityBand.PERFORMANT,
        provenance="not measured on this hardware; Intel's own kernels before portable ones",
    ),
    Rank(
        name="TRITON_ATTN",
        priority=PriorityBand.PERFORMANT - 50,
        provenance="not measured on this hardware; before the backends on torch alone because its "
        "kernels read blocks where they are, and behind the vendors' own",
    ),
    Rank(
        name="IPEX",
        priority=PriorityBand.PERFORMANT - 75,
        provenance="not measured on this hardware; behind TRITON_ATTN because its last release is "
        "for torch 2.8, before the backends on torch alone because it reads blocks where they are",
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

MLA_PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="TRITON_MLA",
        priority=PriorityBand.PERFORMANT - 50,
        provenance="not measured on this hardware; before the backend on torch alone because its "
        "kernels read blocks where they are, and behind the vendors' own",
    ),
    Rank(
        name="TORCH_MLA",
        priority=PriorityBand.PORTABLE,
        provenance="not measured on this hardware; on torch alone, behind kernels that "
        "read blocks where they are",
    ),
)
"""The same for layers of multi-head latent attention."""

MLA_PREFILL_PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="TRITON",
        priority=PriorityBand.PERFORMANT - 50,
        provenance="not measured on this hardware; before torch alone because its kernel takes two "
        "head sizes and gives the LSE, and behind the vendors' own",
    ),
    Rank(
        name="TORCH_SDPA",
        priority=PriorityBand.PORTABLE,
        provenance="not measured on this hardware; on torch alone, behind every kernel of its own",
    ),
)
"""The same for what prefills such layers."""
