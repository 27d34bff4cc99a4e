"""Which tiles an item of Hopper's kernel has: every key once, and none unmasked that is hidden.

Gluon has no interpreter; its functions of numbers alone are run here as the Python that they are.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from attn_triton.kernels import prompt_items

_NUMBERS = SimpleNamespace(minimum=min, maximum=max, where=lambda test, a, b: a if test else b)
_ROWS = 128


def _python(kernel: Any, **more: Any) -> Any:
    """Return a jitted function's Python, with numbers for scalars."""
    scope = {**kernel.fn.__globals__, "gl": _NUMBERS, **more}
    return FunctionType(kernel.fn.__code__, scope)


_last_seen = _python(prompt_items.last_seen)
_tiles_of = _python(prompt_items.tiles_of, last_seen=_last_seen)
_tile_at = _python(prompt_items.tile_at)

_PLACES = [(0, 1), (0, 2), (1, 0), (1, 1), (2, 1)]  # CONTEXT and FRESH
_LENS = [(1, 0), (64, 0), (130, 0), (300, 0), (1, 127), (129, 128), (200, 391)]  # rows, keys before


@pytest.mark.parametrize(
    ("context", "fresh", "rows", "past"),
    [(*place, *lens) for place in _PLACES for lens in _LENS if place[0] or not lens[1]],
)
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("causal", [0, 1, 2])
def test_tiles(context: int, fresh: int, rows: int, past: int, keys: int, causal: int) -> None:
    count = rows + past
    split = {0: count, 1: past, 2: 0}[fresh]
    for flag in (0, 1) if causal == 2 else (0,):
        for m0 in range(0, rows, _ROWS):
            item = (0, flag, 0, m0, 0, rows, count, split)
            tiles = _tiles_of(item, _ROWS, keys, context, fresh, causal)
            for row in {m0, min(m0 + _ROWS, rows) - 1}:
                end = _last_seen(past + row, count, flag, causal)
                assert end == (past + row + 1 if causal == 1 or flag else count)
                assert _seen(tiles, keys, context, fresh, split, count, end) == list(range(end))


def _seen(
    tiles: tuple[int, ...], keys: int, context: int, fresh: int, split: int, count: int, end: int
) -> list[int]:
    """Return the keys that a row adds up which sees those below `end`."""
    number, masked = tiles[0] + tiles[2], tiles[0] + tiles[2] - tiles[1] - tiles[3]
    found: list[int] = []
    for i in range(number):
        is_old, start = _tile_at(i, tiles, split, keys, context, fresh)
        last = min(end, split if is_old else count) if i < max(masked, 1) else start + keys
        found += range(start, min(last, start + keys))
    return sorted(found)


def test_a_padded_row_has_one_hidden_tile() -> None:
    for context, fresh in ((0, 1), (1, 1), (1, 0)):
        tiles = _tiles_of((0, 0, 0, 0, 5, 66, 0, 0), _ROWS, 128, context, fresh, 1)
        assert tiles[0] + tiles[2] == 1
        assert _tile_at(0, tiles, 0, 128, context, fresh) == (fresh == 0, 0)
