"""Launch parameters of the kernels over latents, as data with provenance, as `tiles` has them.

A cache entry is wide (512 + 64 elements for DeepSeek) and each is read once for all heads of a
program, so that the tile of keys decides what fits, and rows decide how a tile is multiplied: from
64 rows on Hopper multiplies out of shared memory, where one tile of latents is operand twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_shared.arch import Arch
from attn_triton.tiles import Tile, next_power_of_2

__all__ = [
    "COMBINE_COLUMNS",
    "COMBINE_ROWS",
    "LatentRow",
    "LatentWidths",
    "latent_row",
    "latent_shared_bytes",
    "latent_tile",
    "least_latent_bytes",
]

COMBINE_COLUMNS = 128
"""Columns of a row that one warp merges the parts of."""

COMBINE_ROWS = 8
"""Rows that one program of four warps merges the parts of, where there are many."""

_LEAST = 16  # rows, keys and widths of the smallest product of tiles
_UNKNOWN_SHARED_BYTES = 64 * 1024
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWidths:
    """What the size of a tile depends on.

    Attributes:
        latent: kv_lora_rank.
        rope: qk_rope_head_dim.
        element_bytes: of a query element.
        cache_bytes: of a cache element.
    """

    latent: int
    rope: int
    element_bytes: int
    cache_bytes: int

    @property
    def padded(self) -> tuple[int, int]:
        """Both widths as tiles have them: powers of two."""
        latent, rope = (max(_LEAST, next_power_of_2(each)) for each in (self.latent, self.rope))
        return latent, rope


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRow:
    """Shapes for a family, at entries of 512 + 64 elements of two bytes.

    Attributes:
        families: of `attn_shared.arch`.
        few: for at most 16 query rows.
        many: for more, with the rows that one program takes at most.
        has_descriptors: tiles arrive through tensor descriptors where one lies in a page.
        provenance: where the numbers come from.
        few_fp8, many_fp8: the same over an fp8 cache, whose entries are widened in registers; None:
            as over others.
    """

    families: tuple[str, ...]
    few: Tile
    many: Tile
    has_descriptors: bool
    provenance: str
    few_fp8: Tile | None = None
    many_fp8: Tile | None = None


_FEW_FP8 = Tile(rows=16, keys=64, num_warps=8, stages=3)
_MANY_FP8 = Tile(rows=32, keys=64, num_warps=8, stages=2)
_NOT_RUN = "not run on hardware; "
_TABLE = (
    LatentRow(
        families=("hopper",),
        few=Tile(rows=16, keys=64, num_warps=4, stages=3),
        many=Tile(rows=64, keys=64, num_warps=8, stages=2),
        few_fp8=_FEW_FP8,
        many_fp8=_MANY_FP8,
        has_descriptors=True,
        provenance="H200, Triton 3.6.0, bf16, page 64: few rows 43.7 us at 32x4096 with 16 heads "
        "(8 warps 45.0, 32 keys 65.2, rows by pointer 50.6); many 91.9 us with 128 heads by the "
        "kernel for Hopper, 113.4 by the portable one; 32 heads 50.7 with 64 rows, 65.2 with 32",
    ),
    LatentRow(
        families=("blackwell", "blackwell-thor", "rubin"),
        few=Tile(rows=16, keys=64, num_warps=4, stages=3),
        many=Tile(rows=32, keys=64, num_warps=8, stages=2),
        few_fp8=_FEW_FP8,
        many_fp8=_MANY_FP8,
        has_descriptors=True,
        provenance=f"{_NOT_RUN}few as on Hopper; compiled: 64 rows spill or do not fit",
    ),
    LatentRow(
        families=("ampere", "ada", "blackwell-consumer"),
        few=Tile(rows=16, keys=32, num_warps=4, stages=3),
        many=Tile(rows=32, keys=32, num_warps=8, stages=2),
        has_descriptors=False,
        provenance=f"{_NOT_RUN}compiled",
    ),
    LatentRow(
        families=("cdna1", "cdna2", "cdna3", "gcn5"),
        few=Tile(rows=16, keys=32, num_warps=4, stages=1),
        many=Tile(rows=16, keys=32, num_warps=4, stages=1),
        has_descriptors=False,
        provenance=f"{_NOT_RUN}compiled: 64 keys do not fit 64 KiB, 32 rows spill 640 bytes",
    ),
    LatentRow(
        families=("cdna4", "cdna5"),
        few=Tile(rows=16, keys=64, num_warps=4, stages=2),
        many=Tile(rows=16, keys=64, num_warps=4, stages=2),
        has_descriptors=False,
        provenance=f"{_NOT_RUN}compiled: 64 keys fit 160 KiB, 64 rows spill 372 bytes",
    ),
    LatentRow(
        families=("rdna1", "rdna2", "rdna3", "rdna3.5", "rdna4"),
        few=Tile(rows=16, keys=16, num_warps=8, stages=1),
        many=Tile(rows=16, keys=16, num_warps=8, stages=1),
        has_descriptors=False,
        provenance=f"{_NOT_RUN}compiled: sums of 16 x 512 fill a wave's registers, 52 bytes "
        "spill on gfx1201 and 916 on gfx1100; more keys or warps spill more",
    ),
)
_OTHERS = LatentRow(
    families=(),
    few=Tile(rows=16, keys=16, num_warps=4, stages=2),
    many=Tile(rows=16, keys=16, num_warps=8, stages=2),
    has_descriptors=False,
    provenance=f"{_NOT_RUN}not compiled either: small shapes that any architecture holds",
)


def latent_row(family: str) -> LatentRow:
    """Return the shapes of a family of architectures; of one in no row, small ones."""
    return next((row for row in _TABLE if family in row.families), _OTHERS)


def latent_shared_bytes(tile: Tile, widths: LatentWidths) -> int:
    """Return about how much shared memory a program of this shape takes.

    Buffers of entries for each stage but one, or with many rows, whose products read them later,
    for each; the queries and the weights.
    """
    latent, rope = widths.padded
    entry = latent + rope
    buffers = max(1, tile.stages - 1) if tile.rows < 64 else tile.stages
    total = tile.keys * entry * widths.cache_bytes * buffers
    if widths.cache_bytes != widths.element_bytes:
        total += tile.keys * entry * widths.element_bytes
    rows = tile.rows if tile.rows >= 64 else 0
    return total + (rows * entry + tile.rows * tile.keys) * widths.element_bytes


def least_latent_bytes(widths: LatentWidths) -> int:
    """Return what the smallest shape takes that there is for these widths."""
    return latent_shared_bytes(Tile(rows=_LEAST, keys=_LEAST, num_warps=4, stages=1), widths)


def latent_tile(arch: Arch, widths: LatentWidths, num_rows: int) -> Tile:
    """Return the shape for requests of so many query rows at most, made to fit the architecture."""
    row = latent_row(arch.family)
    few, many = row.few, row.many
    if widths.cache_bytes == 1:
        few, many = row.few_fp8 or few, row.many_fp8 or many
    tile = few if num_rows <= few.rows else many
    if widths.element_bytes == _FLOAT32_BYTES:
        tile = Tile(rows=_LEAST, keys=_LEAST, num_warps=8, stages=1)
    limit = arch.shared_memory_bytes or _UNKNOWN_SHARED_BYTES
    while latent_shared_bytes(tile, widths) > limit:
        if tile.stages > 1:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > _LEAST:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.rows > _LEAST:
            tile = replace(tile, rows=tile.rows // 2)
        else:
            break  # selection refuses such widths, with the numbers
    return tile
