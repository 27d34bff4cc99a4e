"""Batches that most rules are tried on, by name, in lengths that cross block boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attn_conformance.case import Case
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth

__all__ = ["MANY_ROWS", "QUICK_SHAPES", "TYPICAL", "Lengths", "over_shapes", "shapes_of"]

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""Query lengths and sequence lengths."""

QUICK_SHAPES = ("decode", "mixed")

MANY_ROWS: Lengths = ((1, 1, 40, 33), (50, 90, 60, 33))
"""Enough rows that eager attention's largest error is no matter of luck."""

TYPICAL: tuple[int, int] = (17, 40)
"""Rows and keys of one request beside which a wide head's rounding is typical: products of very
few rows are summed by another routine, whose error is several times smaller."""


def shapes_of(block_size: int) -> Mapping[str, Lengths]:
    """Return (query lengths, sequence lengths) by name; rows stand in the order of `batching`."""
    n = block_size
    return {
        "decode": ((1, 1, 1), (1, n, 2 * n + 1)),
        "prefill": ((n + 1, 3, 2 * n), (n + 1, 3, 2 * n)),
        "extend": ((3, n + 2), (2 * n + 1, 3 * n)),
        "mixed": ((1, 1, 2, 4, n + 1), (2 * n + 1, n, 2 * n, 3 * n - 1, n + 1)),
        "drafts": ((3, 3, 3), (3, n + 1, 3 * n)),
    }


def over_shapes(
    fit: Fit, depth: Depth, suffix: str = "", *, names: tuple[str, ...] = (), **fields: Any
) -> Iterator[Case]:
    """Yield a case for each shape: all of them in full depth, the named or the usual in quick.

    Args:
        fit: what the capability takes.
        depth: how many.
        suffix: what the cases' names end with.
        names: shapes of quick depth; by default the usual two.
        fields: of each case.
    """
    size = fields.get("block_size", fit.block_size)
    for name, (query_lens, seq_lens) in shapes_of(size).items():
        if depth is Depth.FULL or name in (names or QUICK_SHAPES):
            full_name = f"{name}-{suffix}" if suffix else name
            yield fit.case(full_name, query_lens, seq_lens, **fields)
