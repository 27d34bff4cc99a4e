"""The decodes of a step over latents, as the layers of a group read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attn_triton._metadata import Launch
from attn_triton._steps import DecodeGrid

__all__ = ["Merging", "TritonMLADecode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """How parts of requests are merged.

    Attributes:
        programs: of the merging kernel.
        parts_at_once: that `combine` takes at once; 0: `combine_rows` takes them one by one.
    """

    programs: int
    parts_at_once: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TritonMLADecode:
    """How one step's decodes run.

    Attributes:
        grid: of the decode kernel.
        causal: whether rows see keys up to their own alone.
        plan: work items, which the device computes.
        parts: float32 memory for parts of requests.
        stats: float32 memory for their maxima and sums.
        decode: what the decode kernel is handed that is the same for all layers.
        combine: the same of the merging kernel; None: no request is cut.
        parts_at_once: as in `Merging`.
        is_aligned: every tensor is at a multiple of 16 bytes.
    """

    grid: DecodeGrid
    causal: bool
    plan: Tensor
    parts: Tensor
    stats: Tensor
    decode: Launch
    combine: Launch | None
    parts_at_once: int
    is_aligned: bool

    @classmethod
    def of(
        cls,
        grid: DecodeGrid,
        tensors: tuple[Tensor, Tensor, Tensor],
        starts: Tensor,
        lens: Tensor,
        table: Tensor,
        *,
        causal: bool,
        merging: Merging,
    ) -> TritonMLADecode:
        """Return it for a batch.

        Args:
            grid: of the decode kernel.
            tensors: plan, parts and stats.
            starts: (B + 1,) int32 prefix sums of query lengths.
            lens: (B,) int32 keys.
            table: (B, M) int32, its last dimension dense.
            causal: of all rows.
            merging: how parts are merged.
        """
        plan, parts, stats = tensors
        count = len(lens)
        sizes = (count, grid.max_items, grid.max_rows)
        places = (parts, stats) if grid.may_split else (None, None)
        combine = None
        if grid.may_split:
            combine = Launch.of(merging.programs, (parts, stats, plan, starts), sizes)
        decode = Launch.of(
            grid.max_items * grid.blocks, (*places, plan, table), (*sizes, table.stride(0))
        )
        return cls(
            grid=grid,
            causal=causal,
            plan=plan,
            parts=parts,
            stats=stats,
            decode=decode,
            combine=combine,
            parts_at_once=merging.parts_at_once,
            is_aligned=decode.is_aligned and (combine is None or combine.is_aligned),
        )
