"""The default order of backends on CPUs."""

from __future__ import annotations

from attn_shared.platform import PriorityBand
from attn_shared.ranking import Rank

__all__ = ["MLA_PREFILL_PRIORITIES", "MLA_PRIORITIES", "PRIORITIES"]

PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="CPU_ATTN",
        priority=PriorityBand.PERFORMANT,
        provenance="measured on 2 cores with AVX-512 and AMX, torch 2.13.0+cpu, shared with other "
        "work: 0.17 to 0.42 of TORCH_SDPA's time at decode; 0.40 to 0.82 of the time of torch's "
        "SDPA over dense keys at prefill and in mixed batches",
    ),
    Rank(
        name="TORCH_SDPA",
        priority=PriorityBand.PORTABLE,
        provenance="measured on 2 cores with AVX-512 and AMX, torch 2.13.0+cpu: torch's SDPA took "
        "0.44 to 0.82 of compiled flex_attention's time at decode and prefill (without gathering "
        "pages), and compiles nothing",
    ),
    Rank(
        name="FLEX_ATTENTION",
        priority=PriorityBand.PORTABLE - 10,
        provenance="measured on 2 cores with AVX-512 and AMX, torch 2.13.0+cpu: slower than "
        "TORCH_SDPA, and 5 to 31 s of compilation per kind of shape",
    ),
)
"""Rows for `attn_shared.ranking.rank`; a row may name families, architectures and phases."""

MLA_PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="CPU_MLA",
        priority=PriorityBand.PERFORMANT,
        provenance="measured on 2 cores with AVX-512 and AMX, bfloat16: 0.14 to 0.52 of "
        "TORCH_MLA's time at decode",
    ),
    Rank(
        name="TORCH_MLA",
        priority=PriorityBand.PORTABLE,
        provenance="not measured; on torch alone, behind kernels that read blocks where they are",
    ),
)
"""The same for layers of multi-head latent attention."""

MLA_PREFILL_PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="CPU_ATTN",
        priority=PriorityBand.PERFORMANT,
        provenance="measured on 2 cores with AVX-512 and AMX: 0.40 to 0.66 of TORCH_SDPA's time",
    ),
    Rank(
        name="TORCH_SDPA",
        priority=PriorityBand.PORTABLE,
        provenance="not measured; on torch alone, behind every kernel of its own",
    ),
)
"""The same for what prefills such layers."""
