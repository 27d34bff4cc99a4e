"""The default order of backends on AMD GPUs."""

from __future__ import annotations

from attn_rocm._aiter_capability import FLASH, UNIFIED, decodes_by_pages
from attn_rocm._aiter_mla_capability import LATENTS
from attn_shared.platform import PriorityBand
from attn_shared.ranking import Rank
from attn_shared.request import AttentionRequest, Phase

__all__ = ["MLA_PREFILL_PRIORITIES", "MLA_PRIORITIES", "PRIORITIES", "runs_its_fast_path"]


def runs_its_fast_path(request: AttentionRequest) -> bool:
    """Whether ROCM_AITER_FA serves a request by kernels made for it.

    Decodes have one over pages, which knows no windows, sinks or LSE; without it each decode runs
    the kernel for prompts with a tile of rows for one.
    """
    return request.phase is Phase.PREFILL or decodes_by_pages(request)


PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name=FLASH,
        priority=PriorityBand.PERFORMANT,
        fits=runs_its_fast_path,
        provenance="not measured on this hardware; AMD's own kernels before portable ones, where "
        "decodes run by pages or there are none",
    ),
    Rank(
        name=UNIFIED,
        priority=PriorityBand.PERFORMANT - 20,
        provenance="not measured on this hardware; AMD's Triton kernels, which it tunes for its "
        "GPUs, behind its machine code and before TRITON_ATTN",
    ),
    Rank(
        name=FLASH,
        priority=PriorityBand.PERFORMANT - 60,
        provenance="not measured on this hardware; behind TRITON_ATTN where decodes cannot run "
        "by pages (windows, sinks, LSE, more than 16 query heads per kv head, encoders)",
    ),
    Rank(
        name="ROCM_ATTN",
        priority=None,
        provenance="TRITON_ATTN under another name, which serves the same layers",
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

MLA_PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name=LATENTS,
        priority=PriorityBand.PERFORMANT,
        provenance="not measured on this hardware; AMD's own kernels before portable ones",
    ),
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
        name=FLASH,
        priority=PriorityBand.PERFORMANT,
        provenance="not measured on this hardware; AMD's own kernels before portable ones",
    ),
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
