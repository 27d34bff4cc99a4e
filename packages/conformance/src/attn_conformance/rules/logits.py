"""What becomes of a logit: scale, then softcap, then ALiBi, then the mask; sinks beside."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from attn_conformance.case import Case
from attn_conformance.checks import check_numbers
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import MANY_ROWS, over_shapes

__all__ = ["RULES"]


def _scale(depth: Depth, fit: Fit) -> Iterator[Case]:
    for scale in (0.05, 0.7, -0.3, 0.0):
        yield from over_shapes(fit, depth, str(scale), scale=scale)


def _softcap(depth: Depth, fit: Fit) -> Iterator[Case]:
    """A cap that bends most logits, one that bends few, one far above them, and one far below.

    A cap far above scales up what a tanh near 0 errs, which an LSE shows.
    """
    for cap in (0.5, 5.0):
        yield from over_shapes(fit, depth, str(cap), softcap=cap, query_factor=3.0)
    yield from over_shapes(fit, depth, "far-beyond", softcap=1.0, query_factor=1000.0)
    yield fit.case("far-above", (1, 70), (90, 130), softcap=50.0)


def _alibi(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, names=("decode", "extend", "mixed"), has_alibi=True)
    yield from over_shapes(fit, depth, "non-causal", has_alibi=True, causal=False)


def _sinks(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Long sequences are what kernels split, and each split must not bring a sink of its own."""
    yield from over_shapes(fit, depth, names=("decode", "extend", "mixed"), has_sinks=True)
    yield from over_shapes(fit, depth, "scale", has_sinks=True, scale=0.05)
    yield from over_shapes(fit, depth, "window", has_sinks=True, window=(3, 0))
    yield fit.case("long", (1, 1), (700, 1100), has_sinks=True)
    if depth is Depth.FULL:
        yield fit.case("very-long", (1, 2), (9000, 5000), has_sinks=True)


def _long(depth: Depth, fit: Fit) -> Iterator[Case]:
    """What a kernel splits over its units."""
    yield fit.case("decode", (1, 1), (900, 1300))
    yield fit.case("extend", (5,), (1000,))
    if depth is Depth.FULL:
        yield fit.case("decode-very-long", (1, 1), (20000, 3))
        yield fit.case("prefill", (700,), (1500,))


def _large(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Logits whose exponentials overflow, of both signs."""
    yield fit.case("plain", *MANY_ROWS, query_factor=400.0)
    yield fit.case("sinks", *MANY_ROWS, query_factor=400.0, has_sinks=True)
    yield fit.case("decode", (1,) * 8, range(20, 28), query_factor=400.0)


_FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (5, 0)},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "scale": {"scale": 0.6},
    "fp8": {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 2.0},
    "non-causal": {"causal": False},
}


def _combined(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Every pair of features, and all at once."""
    for pair in combinations(_FEATURES, 2):
        fields = {k: v for name in pair for k, v in _FEATURES[name].items()}
        yield from over_shapes(fit, depth, "+".join(pair), names=("mixed",), **fields)
    everything = {k: v for fields in _FEATURES.values() for k, v in fields.items()}
    yield from over_shapes(fit, depth, "all", **everything)
    yield from over_shapes(fit, depth, "all-causal", **{**everything, "causal": True})


RULES = (
    Rule(
        name="scale",
        contract="Logits are scale * q.k, by the caller's scale.",
        make=_scale,
        check=check_numbers,
    ),
    Rule(
        name="softcap",
        contract="Then cap * tanh(x / cap), stable for any finite logit.",
        make=_softcap,
        check=check_numbers,
    ),
    Rule(
        name="alibi",
        contract="Then the ALiBi bias -slope * abs(i - j).",
        make=_alibi,
        check=check_numbers,
    ),
    Rule(
        name="sinks",
        contract="A sink is one more logit per head, neither scaled nor capped, counted once.",
        make=_sinks,
        check=check_numbers,
    ),
    Rule(
        name="long_context",
        contract="Many keys, which kernels split, give the same answer as few.",
        make=_long,
        check=check_numbers,
    ),
    Rule(
        name="large_logits",
        contract="Softmax is stable for any finite logit.",
        make=_large,
        check=check_numbers,
    ),
    Rule(
        name="combinations",
        contract="Features together are right as each is alone.",
        make=_combined,
        check=check_numbers,
    ),
)
