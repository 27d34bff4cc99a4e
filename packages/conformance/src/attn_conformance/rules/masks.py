"""Who sees whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attn_conformance.case import Case
from attn_conformance.checks import check_numbers
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import over_shapes
from attn_shared.request import AttentionType

__all__ = ["RULES"]


def _causal(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, names=("decode", "prefill", "mixed", "drafts"))
    # The sharpest: a key too many or too few is a third of all.
    yield fit.case("three-keys", (1, 2, 3), (3, 3, 3))


def _extend(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Query rows sit at the end of their keys."""
    n = fit.block_size
    yield from over_shapes(fit, depth, names=("extend",))
    for query_len in (2, n - 1, n, n + 1):
        yield fit.case(f"{query_len}-of-{3 * n}", (query_len,), (3 * n,))
    if depth is Depth.FULL:
        yield fit.case("long-prompt", (67, 130), (515, 300))


def _non_causal(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, causal=False)
    yield fit.case("more-rows-than-keys-before", (5, 2), (7, 3), causal=False)


def _per_request(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    lens = ((1, 1, 3, n + 1), (n + 1, 2 * n, 2 * n, n + 1))
    yield fit.case("alternating", *lens, causal=(True, False, False, True))
    yield fit.case("last", *lens, causal=(True, True, True, False))
    yield fit.case("all-causal", *lens, causal=(True,) * 4)
    yield fit.case("window", *lens, causal=(True, False, True, False), window=(2, 1))


def _window(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Bounds around a block's size, and a window of the query's own key alone."""
    n = fit.block_size
    lefts = (0, 1, 2, 3, n - 1, n, 2 * n + 1) if depth is Depth.FULL else (0, 2, n - 1)
    for left in dict.fromkeys(lefts):
        yield from over_shapes(
            fit, depth, f"left-{left}", names=("mixed", "extend"), window=(left, 0)
        )
    yield from over_shapes(fit, depth, "right-open", names=("mixed",), window=(2, None))
    yield from over_shapes(fit, depth, "wider-than-all", names=("decode",), window=(10 * n, 0))


def _two_sided(depth: Depth, fit: Fit) -> Iterator[Case]:
    kinds: dict[str, dict[str, Any]] = {
        "decoder": {"causal": False},
        "encoder": {"attn_type": AttentionType.ENCODER_ONLY},
    }
    lens = ((9, 4, 12), (9, 4, 12))
    for kind, fields in kinds.items():
        for window in ((1, 1), (2, 0), (0, 3), (None, 1)):
            name = f"{kind}-{window[0]}-{window[1]}"
            yield fit.case(name, *lens, window=window, **fields)
    yield fit.case("extend", (3, 5), (9, 11), causal=False, window=(2, 1))


def _ranges(depth: Depth, fit: Fit) -> Iterator[Case]:
    """A range of several positions, one at a prompt's begin, two in one request."""
    n = fit.block_size
    fresh = ((2 * n + 1, n), (2 * n + 1, n))
    later = ((n + 2, 1, 3), (3 * n, n, n + 3))
    yield fit.case("prompt", *fresh, mm_prefix_ranges={0: ((1, n + 1),)})
    yield fit.case("at-begin", *fresh, mm_prefix_ranges={0: ((0, 2),), 1: ((1, 2),)})
    yield fit.case("two", *fresh, mm_prefix_ranges={0: ((1, 3), (n + 1, 2 * n))})
    yield fit.case("cached", *later, mm_prefix_ranges={0: ((2 * n - 3, 3 * n - 2),)})
    yield fit.case("window", *fresh, mm_prefix_ranges={0: ((1, n + 1),)}, window=(1, 0))
    yield fit.case("one-position", *fresh, mm_prefix_ranges={1: ((2, 2),)})


def _chunks(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for blocks in (1, 2):
        yield from over_shapes(
            fit, depth, f"{blocks}-blocks", names=("mixed", "extend"), chunk_size=blocks * n
        )
    lens = ((1, 1, 1, 3), (2 * n, 2 * n + 1, 4 * n, 2 * n + 2))
    yield fit.case("edges", *lens, chunk_size=2 * n)
    yield fit.case("padding", (1, 1, 2), (2 * n + 1, 0, 0), chunk_size=2 * n)


def _encoder_cases(attn_type: AttentionType, fit: Fit) -> Iterator[Case]:
    lens = ((5, 1, 3, 9), (5, 1, 3, 9))
    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "scale": {"scale": 0.7},
        "softcap": {"softcap": 1.5},
        "sinks": {"has_sinks": True},
        "alibi": {"has_alibi": True},
        "equal-lengths": {},
    }
    for name, fields in features.items():
        own = ((4, 4, 4), (4, 4, 4)) if name == "equal-lengths" else lens
        yield fit.case(name, *own, attn_type=attn_type, **fields)


def _encoder(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from _encoder_cases(AttentionType.ENCODER, fit)
    yield fit.case("other-keys", (2, 5), (4, 3), attn_type=AttentionType.ENCODER)


def _encoder_only(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from _encoder_cases(AttentionType.ENCODER_ONLY, fit)
    if depth is Depth.FULL:
        yield fit.case("vision-tower", (196,) * 3, (196,) * 3, attn_type=AttentionType.ENCODER_ONLY)


def _cross(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    cross = {"attn_type": AttentionType.ENCODER_DECODER}
    yield fit.case("first-step", (3, 5), (2 * n + 1, n), **cross)
    yield fit.case("later-step", (1, 1, 1), (2 * n + 1, n, 1), **cross, writes=False)
    yield fit.case("fewer-keys-than-rows", (7, 5), (2, n), **cross, writes=False)
    yield fit.case("scale", (3, 5), (2 * n + 1, n), **cross, scale=0.7)


RULES = (
    Rule(
        name="causal",
        contract="A query sees keys up to its own position.",
        make=_causal,
        check=check_numbers,
    ),
    Rule(
        name="extend",
        contract="Row r of a request sits at position seq_len - query_len + r (bottom-right).",
        make=_extend,
        check=check_numbers,
    ),
    Rule(
        name="non_causal",
        contract="Without a causal mask every row sees every key.",
        make=_non_causal,
        check=check_numbers,
    ),
    Rule(
        name="per_request_causality",
        contract="Causality may be a (B,) boolean: each request by its own rule.",
        make=_per_request,
        check=check_numbers,
    ),
    Rule(
        name="window",
        contract="A window (left, right) leaves that many keys beside the query's own.",
        make=_window,
        check=check_numbers,
    ),
    Rule(
        name="two_sided_window",
        contract="Without a causal mask the window's right side counts.",
        make=_two_sided,
        check=check_numbers,
    ),
    Rule(
        name="multimodal_ranges",
        contract="Positions of one range, both ends included, see each other in both directions.",
        make=_ranges,
        check=check_numbers,
    ),
    Rule(
        name="chunked_local",
        contract="With chunks a query sees keys of its own chunk up to itself.",
        make=_chunks,
        check=check_numbers,
    ),
    Rule(
        name="encoder",
        contract="ENCODER reads no cache, and every token of a request sees all of its keys.",
        make=_encoder,
        check=check_numbers,
    ),
    Rule(
        name="encoder_only",
        contract="ENCODER_ONLY reads no cache, and every token of a request sees all of its keys.",
        make=_encoder_only,
        check=check_numbers,
    ),
    Rule(
        name="cross_attention",
        contract="Cross-attention has the encoder's lengths and table, and no causal mask.",
        make=_cross,
        check=check_numbers,
    ),
)
