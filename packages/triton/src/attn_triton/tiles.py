"""Launch parameters of the attention kernels, as data with provenance; nothing tunes itself.

A row of the table gives the shapes that a family of architectures runs best, as far as that was
measured, at heads of 128. Other widths get the same shapes made smaller until they fit the
architecture's shared memory, which `shared_bytes` estimates: measured on compiled kernels it is
never below what Triton takes for the tiles themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_shared.arch import Arch

__all__ = [
    "COMBINE_PARTS",
    "LaunchRow",
    "Tile",
    "Widths",
    "combine_warps",
    "decode_tiles",
    "launch_row",
    "least_shared_bytes",
    "next_power_of_2",
    "prefill_tile",
    "shared_bytes",
]

COMBINE_PARTS = 32
"""Parts of a request that are merged at a time; more than most waves cut one into."""

_LEAST = 16  # rows, keys and widths of the smallest product of tiles
_UNKNOWN_SHARED_BYTES = 64 * 1024  # of architectures whose limit is in no table
_MOST_DECODE_ROWS = 64
_MANY_ROWS = 64  # from here on Hopper multiplies out of shared memory
_ROWS_TIMES_WIDTH = 64 * 128  # of a decode tile's sums, over 128 threads: 64 registers each
_PREFILL_REGISTERS = 64  # of a thread for a prefill tile's sums
_FP8_MOST = 16 * 128  # of the same for tiles of 128 keys of fp8, which take twice the registers
_NARROW = 64  # heads up to which tiles may be longer
_HALF = 2  # bytes of bfloat16 and float16
_FLOAT32_BYTES = 4
_FLOAT32_KEYS = 32  # and rows, at heads of 128 or less


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """What the size of a tile depends on.

    Attributes:
        head_size: D.
        head_size_v: Dv.
        element_bytes: of a query element.
        cache_bytes: of a cache element.
        is_fp8: the cache is in fp8, which is multiplied in float16.
    """

    head_size: int
    head_size_v: int
    element_bytes: int
    cache_bytes: int
    is_fp8: bool = False

    @property
    def padded(self) -> tuple[int, int]:
        """D and Dv as tiles have them: powers of two."""
        return _padded(self.head_size), _padded(self.head_size_v)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One program's shape.

    Attributes:
        rows: query rows.
        keys: keys per iteration.
        num_warps: warps.
        stages: depth of the loop's software pipeline.
        max_registers: registers of a thread that the compiler is held to; None: its own choice.
        programs_per_unit: how many of them are meant to share a compute unit.
    """

    rows: int
    keys: int
    num_warps: int
    stages: int
    max_registers: int | None = None
    programs_per_unit: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRow:
    """Shapes for a family, at heads of 128.

    Attributes:
        families: of `attn_shared.arch`.
        decode: for waves of few programs, pipelined deeply.
        decode_full: for waves of more.
        prefill: for many rows.
        provenance: where the numbers come from.
        decode_fp8: for any wave over an fp8 cache; None: as over others.
        decode_narrow: for waves of few programs at heads of 64 and less; None: as at others.
        most_elements: of a tile of keys; wider heads get fewer keys, since registers spill.
    """

    families: tuple[str, ...]
    decode: Tile
    decode_full: Tile
    prefill: Tile
    provenance: str
    decode_fp8: Tile | None = None
    decode_narrow: Tile | None = None
    most_elements: int = 64 * 512


_H200 = (
    "H200, Triton 3.6.0, bf16, 32/8 heads of 128, page 16: decode 122.5 us at 32x4096 with 3 "
    "stages in one wave (2 programs a unit), 2 stages for 3 or 4; prefill by gathered rows "
    "466 TFLOP/s at 1x4096 with 128 x 64, 8 warps, 128 registers; fp8 cache at 32x4096: 101 us "
    "with 128 keys, 116 to 126 with 64, 142 with 8 warps; heads of 64 at 32x4096: 68.1 us with 128 "
    "keys, 74.6 with 64"
)
_NOT_RUN = "not run on hardware; "
_DEEP = Tile(rows=16, keys=64, num_warps=4, stages=3, programs_per_unit=2)
_FULL = Tile(rows=16, keys=64, num_warps=4, stages=2, programs_per_unit=4)
_LARGE = Tile(rows=128, keys=64, num_warps=8, stages=2)

_TABLE = (
    LaunchRow(
        families=("hopper",),
        decode=_DEEP,
        decode_full=_FULL,
        prefill=replace(_LARGE, max_registers=128),
        decode_fp8=replace(_DEEP, keys=128),
        decode_narrow=replace(_DEEP, keys=128),
        provenance=_H200,
    ),
    LaunchRow(
        families=("blackwell", "blackwell-thor", "rubin"),
        decode=_DEEP,
        decode_full=_FULL,
        prefill=_LARGE,
        provenance=f"{_NOT_RUN}the shapes of Hopper; compiled: no spills",
    ),
    LaunchRow(
        families=("ampere", "ada", "blackwell-consumer"),
        decode=_DEEP,
        decode_full=_FULL,
        prefill=Tile(rows=64, keys=32, num_warps=4, stages=2),
        provenance=f"{_NOT_RUN}decode as on Hopper; compiled: prefill spills at 128 x 64",
    ),
    LaunchRow(
        families=("cdna1", "cdna2", "cdna3", "cdna4", "cdna5", "gcn5"),
        decode=Tile(rows=16, keys=64, num_warps=4, stages=2, programs_per_unit=2),
        decode_full=Tile(rows=16, keys=64, num_warps=4, stages=2, programs_per_unit=2),
        prefill=Tile(rows=64, keys=64, num_warps=4, stages=1),
        provenance=f"{_NOT_RUN}compiled: no spills",
    ),
    LaunchRow(
        families=("rdna1", "rdna2", "rdna3", "rdna3.5", "rdna4"),
        decode=Tile(rows=16, keys=32, num_warps=4, stages=1, programs_per_unit=2),
        decode_full=Tile(rows=16, keys=32, num_warps=4, stages=1, programs_per_unit=2),
        prefill=Tile(rows=32, keys=16, num_warps=4, stages=1),
        provenance=f"{_NOT_RUN}compiled: 128 x 64 tiles spill 630 to 1520 registers, these none",
        most_elements=16 * 256,
    ),
)
_OTHERS = LaunchRow(
    families=(),
    decode=Tile(rows=16, keys=32, num_warps=4, stages=2, programs_per_unit=2),
    decode_full=Tile(rows=16, keys=32, num_warps=4, stages=2, programs_per_unit=2),
    prefill=Tile(rows=64, keys=32, num_warps=4, stages=2),
    provenance=f"{_NOT_RUN}not compiled either: small shapes that any architecture holds",
)


def launch_row(family: str) -> LaunchRow:
    """Return the shapes of a family of architectures; of one in no row, small ones."""
    return next((row for row in _TABLE if family in row.families), _OTHERS)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below `number`, which is positive."""
    return 1 << (number - 1).bit_length()


def shared_bytes(tile: Tile, widths: Widths) -> int:
    """Return about how much shared memory a program of this shape takes.

    Buffers of keys and values for each stage but one, the queries, and the weights; for many rows
    the keys and values once more in the queries' dtype, where the cache has another: products of
    few rows take them from registers.
    """
    width, width_v = widths.padded
    elements = tile.keys * (width + width_v)
    total = elements * widths.cache_bytes * max(1, tile.stages - 1)
    if widths.cache_bytes != widths.element_bytes and tile.rows >= _MANY_ROWS:
        total += elements * widths.element_bytes
    return total + tile.rows * (width + tile.keys) * widths.element_bytes


def least_shared_bytes(widths: Widths) -> int:
    """Return what the smallest shape takes that there is for these widths."""
    return shared_bytes(Tile(rows=_LEAST, keys=_LEAST, num_warps=4, stages=1), widths)


def decode_tiles(arch: Arch, widths: Widths, num_rows: int) -> tuple[Tile, Tile]:
    """Return the shapes for waves of few programs and of more.

    Args:
        arch: the architecture.
        widths: of the layer.
        num_rows: query rows of one kv head that a request has at most.
    """
    row = _row_for(arch, widths)
    most = min(_MOST_DECODE_ROWS, max(_LEAST, _ROWS_TIMES_WIDTH // widths.padded[1]))
    rows = min(most, max(_LEAST, next_power_of_2(num_rows)))
    if widths.is_fp8 and row.decode_fp8 is not None and rows * widths.padded[1] <= _FP8_MOST:
        tile = _in_waves(replace(row.decode_fp8, rows=rows), widths, arch)
        return tile, tile
    deep, is_narrow = row.decode, max(widths.padded) <= _NARROW and widths.cache_bytes == _HALF
    if row.decode_narrow is not None and is_narrow and rows == _LEAST:
        deep = row.decode_narrow
    return (
        _in_waves(replace(deep, rows=rows), widths, arch),
        _in_waves(replace(row.decode_full, rows=rows), widths, arch),
    )


def combine_warps(padded_v: int) -> int:
    """Return the warps that merge the parts of one row.

    One for a width of 128: each thread then holds its columns of all parts, and sums them without
    another. That many registers are all there are, so that wider heads get more.
    """
    return max(1, padded_v // 128)


def prefill_tile(arch: Arch, widths: Widths) -> Tile:
    """Return the shape for many rows."""
    tile = _row_for(arch, widths).prefill
    most = tile.num_warps * 32 * _PREFILL_REGISTERS // widths.padded[1]
    if most < tile.rows:
        tile = replace(tile, rows=max(_LEAST, most), max_registers=None)
    return _shrunk(tile, widths, _limit(arch))


def _row_for(arch: Arch, widths: Widths) -> LaunchRow:
    """Return the family's shapes, smaller for wide heads and for float32.

    Products of float32 without TF32 run on no tensor core: each thread holds the operands of its
    part of the tile in registers.
    """
    row = launch_row(arch.family)
    rows, keys = row.prefill.rows, row.most_elements // max(widths.padded)
    if widths.element_bytes == _FLOAT32_BYTES:
        rows = keys = min(_FLOAT32_KEYS, _FLOAT32_KEYS * 128 // max(widths.padded))
    return replace(
        row,
        decode=_at_most(row.decode, rows=row.decode.rows, keys=keys),
        decode_full=_at_most(row.decode_full, rows=row.decode_full.rows, keys=keys),
        prefill=_at_most(row.prefill, rows=rows, keys=keys),
    )


def _at_most(tile: Tile, *, rows: int, keys: int) -> Tile:
    """Return the tile with at most so many rows and keys, and the registers that it then needs."""
    if rows >= tile.rows and keys >= tile.keys:
        return tile
    rows, keys = (max(_LEAST, min(pair)) for pair in ((tile.rows, rows), (tile.keys, keys)))
    return replace(tile, rows=rows, keys=keys, max_registers=None)


def _in_waves(tile: Tile, widths: Widths, arch: Arch) -> Tile:
    """Make a tile fit, and say how many of them share a unit."""
    limit = _limit(arch)
    wanted = tile.programs_per_unit
    while tile.stages > 2 and shared_bytes(tile, widths) * wanted > limit:
        tile = replace(tile, stages=tile.stages - 1)
    tile = _shrunk(tile, widths, limit)
    fits = limit // shared_bytes(tile, widths)
    return replace(tile, programs_per_unit=max(1, min(wanted, fits)))


def _shrunk(tile: Tile, widths: Widths, limit: int) -> Tile:
    """Return the tile with fewer stages, keys and rows, in this order, until it fits."""
    while shared_bytes(tile, widths) > limit:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > _LEAST:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.rows > _LEAST:
            tile = replace(tile, rows=tile.rows // 2)
        else:
            break  # selection refuses such widths, with the numbers
    return tile


def _limit(arch: Arch) -> int:
    return arch.shared_memory_bytes or _UNKNOWN_SHARED_BYTES


def _padded(width: int) -> int:
    return max(_LEAST, next_power_of_2(width))
