"""Shapes of the kernel for long prompts, as data with provenance; nothing tunes itself.

A family of architectures without a row here has no tensor descriptors that Triton's compiler turns
into copies of their own, or has not been tried; its prompts run on the plain kernel, whose shapes
are in `attn_triton.tiles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from attn_shared.arch import Arch
from attn_triton.tiles import Widths

__all__ = ["HOPPER_PIECE", "PromptKernel", "PromptTile", "prompt_tile", "section_heads"]

HOPPER_PIECE = 64
"""Rows and columns that the kernel for Hopper copies out of a page at once."""

_HALF_BYTES = 2  # of an element: bfloat16 or float16


class PromptKernel(StrEnum):
    """Which of the kernels for long prompts a shape is for."""

    PORTABLE = "portable"
    """`kernels.prompt`, for every GPU with tensor descriptors."""
    HOPPER = "hopper"
    """`kernels.prompt_hopper`, whose programs take one block after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTile:
    """One program's shape.

    Attributes:
        block: query rows of a block.
        is_pair: whether a program has two blocks, the second's weights computed while the first's
            values are summed; on Hopper's kernel each is that of a group of warps.
        keys: keys per iteration.
        num_warps: warps.
        stages: depth of the loops' software pipeline.
        max_registers: registers of a thread that the compiler is held to; None: its own choice.
        kernel: that the shape is for.
        is_staged: Hopper's kernel has buffers for outputs, and not those of the queries.
    """

    block: int
    is_pair: bool
    keys: int
    num_warps: int
    stages: int
    max_registers: int | None = None
    kernel: PromptKernel = PromptKernel.PORTABLE
    is_staged: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return self.block * (2 if self.is_pair else 1)

    def cached(self, width: int) -> tuple[int, int]:
        """Return the rows and columns that are copied out of a page at once, for such heads."""
        if self.kernel is PromptKernel.HOPPER:
            return HOPPER_PIECE, HOPPER_PIECE
        return self.keys, width


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """Shapes for a family, by the wider of the two head sizes.

    Attributes:
        families: of `attn_shared.arch`.
        tiles: for heads of each size.
        few: likewise, where a wave holds all programs: smaller ones share its time more evenly.
        hopper: for the kernel for Hopper, with heads of each size that it serves.
        provenance: where the numbers come from.
    """

    families: tuple[str, ...]
    tiles: Mapping[int, PromptTile]
    provenance: str
    few: Mapping[int, PromptTile] = field(default_factory=dict)
    hopper: Mapping[int, PromptTile] = field(default_factory=dict)


_H200 = (
    "H200, Triton 3.6.0, bf16, one run, TFLOP/s. Heads of 128 at 1x4096, 1x16384, 8x2048: 504, "
    "547, 437 with 2 x 64 rows, 64 keys, 4 warps, 2 stages; 421, 480, 365 with 3 stages; 486, 496, "
    "444 with 128 rows, 8 warps, 128 registers; 434, 452, 403 with 64 rows; 279, 315, 250 with 128 "
    "keys. Heads of 64 at 1x4096, 8x2048: 418, 371 with 64 rows, 128 keys, 4 warps; 399, "
    "370 with 64 keys; 352, 322 with 2 x 64 rows. Heads of 256 at 1x4096: 498 with 128 rows, 64 "
    "keys, 8 warps, 2 stages; 453 with 32 keys, 3 stages; 411 with 64 rows, 32 keys, 4 warps. The "
    "kernel for Hopper, another run, at 1x4096, 1x16384, 8x2048: 604, 651, 534 with 128 keys where "
    "the one for every GPU has 473, 508, 428; heads of 256 at 1x4096, 8x2048: 646, 573 with 64 "
    "keys, and 450, 397; heads of 64: 417, 382, and 429, 379"
)
_PAIR = PromptTile(block=64, is_pair=True, keys=64, num_warps=4, stages=2)
_GROUPS = replace(_PAIR, keys=128, kernel=PromptKernel.HOPPER, is_staged=True)
_ALONE = PromptTile(block=128, is_pair=False, keys=64, num_warps=8, stages=2)

_TABLE = (
    PromptRow(
        families=("hopper",),
        tiles=MappingProxyType(
            {
                64: PromptTile(block=64, is_pair=False, keys=128, num_warps=4, stages=2),
                128: _PAIR,
                256: PromptTile(block=128, is_pair=False, keys=64, num_warps=8, stages=2),
            }
        ),
        provenance=_H200,
        few=MappingProxyType({128: replace(_PAIR, is_pair=False)}),
        hopper=MappingProxyType({128: _GROUPS, 256: replace(_GROUPS, keys=64, is_staged=False)}),
    ),
    PromptRow(
        families=("blackwell", "blackwell-thor", "rubin"),
        tiles=MappingProxyType({64: _ALONE, 128: _ALONE}),
        provenance="not run on hardware; compiled: no spills",
    ),
)


def prompt_tile(
    arch: Arch,
    widths: Widths,
    *,
    is_few: bool = False,
    kernel: PromptKernel = PromptKernel.PORTABLE,
) -> PromptTile | None:
    """Return the shape for heads of these sizes; None where the kernel does not serve them.

    Args:
        arch: the architecture.
        widths: of the layer.
        is_few: one wave holds all programs of the usual shape.
        kernel: that runs; the one for Hopper has one shape for few and many.
    """
    row = next((row for row in _TABLE if arch.family in row.families), None)
    sizes = (widths.head_size, widths.head_size_v)
    if row is None or widths.element_bytes != _HALF_BYTES:
        return None
    if kernel is PromptKernel.HOPPER:
        return row.hopper.get(max(sizes)) if min(sizes) in row.hopper else None
    if any(size not in row.tiles for size in sizes):
        return None
    usual = row.tiles[max(sizes)]
    return row.few.get(max(sizes), usual) if is_few else usual


def section_heads(
    num_kv_heads: int, group: int, widths: Widths, longest: int, cache_bytes: int
) -> int:
    """Return the query heads whose keys and values are walked together.

    Keys of a section should stay in half the L2 cache while blocks of queries pass over them. Of
    fewer than two kv heads the last blocks leave multiprocessors idle.

    Args:
        num_kv_heads: Hkv.
        group: query heads per kv head.
        widths: of the layer.
        longest: keys of the longest request, at most.
        cache_bytes: of the device's L2.
    """
    each = max(1, longest) * (widths.head_size + widths.head_size_v) * widths.element_bytes
    most = max(2, cache_bytes // 2 // each)
    return group * max(
        count for count in range(1, num_kv_heads + 1) if not num_kv_heads % count and count <= most
    )
