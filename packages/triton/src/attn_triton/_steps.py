"""How one step's batch is launched: sizes of grids, and the buffers that the kernels fill."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.quantization import FP8_DTYPES
from attn_shared.spec import LayerSpec
from attn_triton.machine import Machine
from attn_triton.tiles import Tile, Widths, decode_tiles, prefill_tile

__all__ = [
    "MAX_DECODE_TOKENS",
    "MAX_PARTS",
    "Composition",
    "DecodeGrid",
    "Planner",
    "Shape",
    "composition_of",
    "is_ragged",
    "is_split",
    "plan_ints",
    "query_lens",
    "shape_of",
]

MAX_DECODE_TOKENS = 16
"""Query tokens up to which a request's keys are cut into parts."""

MAX_PARTS = 8
"""In batch-invariant mode: into how many parts a request is cut at most."""

_MOST_PROGRAMS_PER_UNIT = 4
_PLAN_HEADER = 4  # as kernels.plan.HEADER, which only a process with Triton may import
_PLAN_RECORD = 8  # as kernels.plan.RECORD

_RAGGED = 2  # longest over mean; 15 x 500 + 60000 tokens on an H200: 73 us with it, 88 without

_SLOTS_PER_EXTRA = 4
"""So many slots let there be one part more, since short ones share slots; a program without a part
still takes its turn."""

_LEAST_PART_TILES = 8  # in that mode: 512 keys, so that short requests need no second kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What the host knows of a batch, exactly or as a bound.

    Attributes:
        num_decodes: requests of few query tokens, at most.
        decode_tokens: query tokens of one of them, at most; 0 without any.
        num_blocks: blocks of query rows of the other requests, at most.
    """

    num_decodes: int
    decode_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGrid:
    """How the decode kernel runs.

    Attributes:
        tile: of one program.
        blocks: blocks of rows of one request and kv head.
        max_rows: query rows of one kv head that a request has at most.
        max_items: parts of requests, at most.
        slots: parts that one wave holds; 0: requests are not cut to fill one.
        may_split: whether a request can be in several parts, so that they must be combined.
    """

    tile: Tile
    blocks: int
    max_rows: int
    max_items: int
    slots: int
    may_split: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """What the machine code of a step depends on, beside the layer; made by `shape_of`.

    Equal ones are made once, so that looking up what was compiled for one hashes its identity.
    """

    decode: Tile | None
    blocks: int
    prefill: Tile | None


@functools.cache
def shape_of(decode: Tile | None, blocks: int, prefill: Tile | None) -> Shape:
    """Return the shape of these tiles, always the same object."""
    return Shape(decode=decode, blocks=blocks, prefill=prefill)


class Planner:
    """Chooses grids for the batches of a group of layers."""

    def __init__(
        self, layer: LayerSpec, machine: Machine, *, cache_dtype: torch.dtype, is_invariant: bool
    ) -> None:
        """Keep what does not change from step to step."""
        self.machine = machine
        self.group = layer.queries_per_kv
        self.num_kv_heads = layer.num_kv_heads
        self.head_size_v = layer.head_size_v
        self.is_invariant = is_invariant
        self.widths = Widths(
            head_size=layer.head_size,
            head_size_v=layer.head_size_v,
            element_bytes=layer.dtype.itemsize,
            cache_bytes=cache_dtype.itemsize,
            is_fp8=cache_dtype in FP8_DTYPES,
        )
        self.prefill = prefill_tile(machine.arch, self.widths)
        self._tiles: dict[int, tuple[Tile, Tile]] = {}
        # In batch-invariant mode the shape of a tile must not depend on the longest neighbour.
        self.most_tokens = 1 if is_invariant else MAX_DECODE_TOKENS

    def decode_grid(
        self, composition: Composition, max_seq_len: int, spans: Sequence[int] | None = None
    ) -> DecodeGrid:
        """Return how a batch's decodes run.

        A wave is what the compute units hold at once: two deeply pipelined programs each, or more
        that are less so. What fits is cut to fill one wave; more cuts never paid. Where one
        request is much longer than the others its parts would run on when theirs are done, so that
        there are more and shorter ones.

        Args:
            composition: of the batch.
            max_seq_len: a bound of the keys of one request.
            spans: keys that each decode's rows see, where the host knows them exactly.
        """
        max_rows = composition.decode_tokens * self.group
        deep, full = self._tiles_for(max_rows)
        blocks = -(-max_rows // deep.rows)
        units, count = self.machine.compute_units, composition.num_decodes
        columns = self.num_kv_heads * blocks
        if self.is_invariant:
            tile, items, slots = deep, count * MAX_PARTS, 0
            may_split = max_seq_len > _LEAST_PART_TILES * tile.keys
        else:
            is_ragged_wave = spans is not None and is_ragged(spans)
            tile = self._tile_of_wave(count * columns, deep, full, is_ragged=is_ragged_wave)
            slots = max(1, units * tile.programs_per_unit // columns)
            may_split = count < slots and max_seq_len > tile.keys
            if may_split and spans:
                may_split = is_split(spans, tile.keys, slots)
            items = max(slots, count) + slots // _SLOTS_PER_EXTRA
        return DecodeGrid(
            tile=tile,
            blocks=blocks,
            max_rows=max_rows,
            max_items=items if may_split else count,
            slots=slots if may_split else 0,
            may_split=may_split,
        )

    def _tile_of_wave(self, programs: int, deep: Tile, full: Tile, *, is_ragged: bool) -> Tile:
        """Choose by how many programs there are before anything is cut.

        Deep ones where a wave of them holds all, and again where several waves of either are
        needed; those that a full wave holds and a deep one does not run as one full wave.
        """
        units = self.machine.compute_units
        if programs <= units * deep.programs_per_unit:
            return full if is_ragged else deep
        return full if programs <= units * full.programs_per_unit else deep

    def _tiles_for(self, max_rows: int) -> tuple[Tile, Tile]:
        found = self._tiles.get(max_rows)
        if found is None:
            found = decode_tiles(self.machine.arch, self.widths, max_rows)
            self._tiles[max_rows] = found
        return found

    @property
    def most_slots(self) -> int:
        """A bound of the requests among which one may be cut."""
        return _MOST_PROGRAMS_PER_UNIT * self.machine.compute_units // self.num_kv_heads

    def part_floats(self, grid: DecodeGrid) -> tuple[int, int]:
        """Return how many floats the parts' values and their maxima and sums take."""
        rows = grid.max_items * self.num_kv_heads * grid.max_rows if grid.may_split else 0
        return rows * self.head_size_v, rows * 2

    @property
    def least_part_tiles(self) -> int:
        """Tiles that a part has at least, in batch-invariant mode."""
        return _LEAST_PART_TILES


def composition_of(
    common: CommonAttentionMetadata,
    *,
    group: int,
    rows: int,
    most_tokens: int,
    is_cache_free: bool,
    is_bound: bool,
) -> Composition:
    """Return what a batch is made of.

    Args:
        common: the batch.
        group: query heads per kv head.
        rows: query rows of a block of the prefill kernel.
        most_tokens: query tokens up to which a request decodes.
        is_cache_free: nothing decodes.
        is_bound: return bounds for every batch of as many requests and tokens, for a captured
            graph, whose replays have other lengths.
    """
    count, tokens, longest = common.num_reqs, common.num_actual_tokens, common.max_query_len
    if not is_cache_free and longest <= most_tokens:
        return Composition(num_decodes=count, decode_tokens=longest, num_blocks=0)
    if is_bound:
        blocks = count + tokens * group // rows
        decodes = 0 if is_cache_free else count
        return Composition(
            num_decodes=decodes, decode_tokens=most_tokens if decodes else 0, num_blocks=blocks
        )
    most = 0 if is_cache_free else most_tokens
    lens = query_lens(common)
    short = [length for length in lens if 0 < length <= most]
    return Composition(
        num_decodes=len(short),
        decode_tokens=max(short, default=0),
        num_blocks=sum(-(-length * group // rows) for length in lens if length > most),
    )


def plan_ints(records: int, num_reqs: int) -> int:
    """Return the int32 of a plan, as `kernels.plan` lays it out.

    Args:
        records: items that it has room for.
        num_reqs: requests.
    """
    return _PLAN_HEADER + _PLAN_RECORD * records + 3 * (num_reqs + 1)


def query_lens(common: CommonAttentionMetadata) -> list[int]:
    """Return the query tokens of each request; a list is faster than operations on few numbers."""
    starts: list[int] = common.query_start_loc_cpu.tolist()
    return [stop - start for start, stop in pairwise(starts)]


def is_ragged(spans: Sequence[int]) -> bool:
    """Return whether one request has so many keys that it outlasts the others of a wave."""
    return len(spans) > 1 and max(spans) * len(spans) > _RAGGED * sum(spans)


def is_split(spans: Sequence[int], keys: int, slots: int) -> bool:
    """Return whether the plan kernel should cut any request, to fill so many slots.

    It looks for the smallest part that fits; three sizes tell whether one below the longest does.

    Args:
        spans: keys that each request's rows see, exactly.
        keys: of a tile.
        slots: parts that one wave holds.
    """
    tiles = Counter([-(-span // keys) for span in spans])
    longest = max(tiles)
    sizes = {longest - 1, 3 * longest // 4, longest // 2}
    whole = sum(each * count for each, count in tiles.items())
    return any(whole <= size * slots and _fits(tiles, size, slots) for size in sizes if size > 0)


def _fits(tiles: Mapping[int, int], size: int, slots: int) -> bool:
    """Return whether parts of so many tiles fit, counted in quarters as the plan kernel does.

    Args:
        tiles: how many requests have so many tiles, by tiles.
        size: tiles of a part.
        slots: that one wave has.
    """
    quarters = 0
    for each, count in tiles.items():
        full, rest = divmod(each, size)
        short = 0 if not rest else 1 if 4 * rest <= size else 2 if 2 * rest <= size else 4
        quarters += max(1, 4 * full + short) * count
    return quarters <= 4 * slots
