"""Counts and widths of heads, and dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_conformance.case import Case
from attn_conformance.checks import check_numbers
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import MANY_ROWS, TYPICAL, over_shapes
from attn_shared.dtypes import COMPUTE_DTYPES
from attn_shared.request import AttentionType

__all__ = ["HEAD_SIZES", "RATIOS", "RULES"]

RATIOS = (1, 3, 5, 6, 7, 8, 20)
"""Query heads per kv head: powers of two or not, and more than a kernel's tile of 16."""

HEAD_SIZES = (32, 40, 56, 64, 72, 80, 88, 96, 112, 120, 128, 160, 192, 256, 320, 512, 576)
"""Widths that models have."""

_ODD_HEAD_SIZES = (1, 7, 33, 100, 250)


def _ratios(depth: Depth, fit: Fit) -> Iterator[Case]:
    for ratio in RATIOS:
        for kv_heads in (1, 2) if depth is Depth.QUICK else (1, 2, 3):
            heads = {"num_heads": ratio * kv_heads, "num_kv_heads": kv_heads}
            yield from over_shapes(fit, depth, f"{ratio}-of-{kv_heads}", names=("mixed",), **heads)


def _sizes(depth: Depth, fit: Fit) -> Iterator[Case]:
    few = {"num_heads": 2, "num_kv_heads": 1}
    n, (rows, keys) = fit.block_size, TYPICAL
    for size in (*HEAD_SIZES, *_ODD_HEAD_SIZES):
        yield fit.case(f"{size}", (1, 2, rows), (2 * n + 1, n, keys), head_size=size, **few)


def _value_sizes(depth: Depth, fit: Fit) -> Iterator[Case]:
    pairs = ((16, 32), (32, 16), (192, 128), (576, 512), (64, 1), (24, 40))
    for size, value_size in pairs:
        sizes = {"head_size": size, "head_size_v": value_size, "num_heads": 2, "num_kv_heads": 1}
        yield from over_shapes(fit, depth, f"{size}-{value_size}", names=("mixed",), **sizes)
    encoder = AttentionType.ENCODER_ONLY
    yield fit.case("encoder", (5, 3), (5, 3), head_size=32, head_size_v=16, attn_type=encoder)


def _dtypes(depth: Depth, fit: Fit) -> Iterator[Case]:
    for name, dtype in COMPUTE_DTYPES.items():
        names = ("decode", "mixed", "prefill")
        yield from over_shapes(fit, depth, name, names=names, dtype=dtype)
        yield fit.case(f"long-{name}", (1, 4), (500, 300), dtype=dtype)


def _precision(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Products that 10 bits of mantissa, as TF32 has, get wrong beyond the budget."""
    for size in (64, 128):
        yield fit.case(f"{size}", *MANY_ROWS, dtype=torch.float32, head_size=size)


RULES = (
    Rule(
        name="gqa",
        contract="The kv head of query head h is h // (Hq / Hkv), for any integer ratio.",
        make=_ratios,
        check=check_numbers,
    ),
    Rule(
        name="head_sizes",
        contract="Every head size that the capability takes is right.",
        make=_sizes,
        check=check_numbers,
    ),
    Rule(
        name="value_head_sizes",
        contract="Values may be wider or narrower than keys.",
        make=_value_sizes,
        check=check_numbers,
    ),
    Rule(
        name="dtypes",
        contract="In each dtype the error is at most twice eager attention's, plus one ulp of V.",
        make=_dtypes,
        check=check_numbers,
    ),
    Rule(
        name="ieee_float32",
        contract="float32 means IEEE, no TF32.",
        make=_precision,
        check=check_numbers,
    ),
)
