"""What nobody may read, and rows that see nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attn_conformance.case import Case
from attn_conformance.checks import check_numbers
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import over_shapes
from attn_conformance.subject import Subject
from attn_shared.capability import Reason
from attn_shared.request import AttentionType

__all__ = ["RULES"]

_CROSS: dict[str, Any] = {"attn_type": AttentionType.ENCODER_DECODER}


def _blocks(depth: Depth, fit: Fit) -> Iterator[Case]:
    """All caches have blocks of NaN, all tables end in ids of those and of none at all."""
    yield from over_shapes(fit, depth, names=("decode", "extend", "mixed"))
    n = fit.block_size
    # One long row makes all others mostly garbage.
    yield fit.case("one-long-row", (1, 1, 2), (7 * n, 1, 2))


def _query_rows(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, num_padding_rows=3)
    yield fit.case("encoder", (5, 3), (5, 3), attn_type=AttentionType.ENCODER, num_padding_rows=3)
    yield fit.case("int8", (1, 3), (5, 7), kv_cache_dtype="int8_per_token_head", num_padding_rows=3)


def _tails(depth: Depth, fit: Fit) -> Iterator[Case]:
    """One token in the last block leaves the longest tail."""
    n = fit.block_size
    for kv_cache_dtype in ("auto", "fp8", "fp8_e5m2", "int8_per_token_head"):
        lens = ((1, 1, 3), (n + 1, 1, 2 * n + 1))
        yield fit.case(kv_cache_dtype, *lens, kv_cache_dtype=kv_cache_dtype)
    yield fit.case("non-causal", (1, 3), (n + 1, n + 2), causal=False)
    yield fit.case("cross", (1, 3), (n + 1, 2), **_CROSS)


def _nan_tails(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from (
        case.with_fields(name=f"nan-{case.name}", nan_tail=True) for case in _tails(depth, fit)
    )


def _tolerates(subject: Subject, case: Case) -> tuple[Reason, ...]:
    if subject.capability.tolerates_nan_tail:
        return subject.excluded(case)
    return (Reason(code="tolerates_nan_tail", value="False", allowed="True here"),)


def _padded(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for name, fields in _FEATURES.items():
        yield fit.case(f"decode-{name}", (1, 1, 1), (n + 1, 0, 0), **fields)
        yield fit.case(f"mixed-{name}", (1, 3, 2), (n + 1, n, 0), **fields)
    yield fit.case("all", (1, 1), (0, 0), has_sinks=True)
    yield fit.case("drafts", (3, 3, 3), (n + 1, 0, 0))
    yield fit.case("fp8", (1, 1), (n + 1, 0), kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0)


_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"has_sinks": True},
    "window": {"window": (2, 0)},
    "non-causal": {"causal": False},
}


def _keyless(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for name in ("plain", "sinks"):
        fields = _FEATURES[name]
        yield fit.case(f"cross-{name}", (1, 3, 2), (n + 1, 0, 2), **_CROSS, **fields)
        encoder = {"attn_type": AttentionType.ENCODER, **fields}
        yield fit.case(f"encoder-{name}", (2, 3, 4), (2, 0, 4), **encoder)


def _queryless(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.case("between", (1, 0, 3), (n + 1, n, 2 * n))
    yield fit.case("last", (1, 1, 0), (n, n + 1, n))
    yield fit.case("padding", (1, 2, 0, 0), (n, n + 1, 0, 0))
    yield fit.case("all", (0, 0), (n, 2))


def _empty(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield fit.case("no-request", (), ())
    yield fit.case("no-request-padded-rows", (), (), num_padding_rows=2)
    yield fit.case("encoder", (), (), attn_type=AttentionType.ENCODER_ONLY)


RULES = (
    Rule(
        name="unread_blocks",
        contract="Blocks of no one and table entries past a row's last block are never read.",
        make=_blocks,
        check=check_numbers,
    ),
    Rule(
        name="unread_query_rows",
        contract="Rows past query_start_loc[-1] are never read.",
        make=_query_rows,
        check=check_numbers,
    ),
    Rule(
        name="finite_tails",
        contract="Slots past seq_len in a used block may hold any finite value.",
        make=_tails,
        check=check_numbers,
    ),
    Rule(
        name="nan_tails",
        contract="With tolerates_nan_tail those slots may hold NaN.",
        make=_nan_tails,
        check=check_numbers,
        excluded=_tolerates,
    ),
    Rule(
        name="padded_requests",
        contract="A row of seq_len 0 gives output 0 and LSE -inf, or the sink's logit.",
        make=_padded,
        check=check_numbers,
    ),
    Rule(
        name="keyless_rows",
        contract="A row without a visible key gives output 0 and LSE -inf, or the sink's logit.",
        make=_keyless,
        check=check_numbers,
    ),
    Rule(
        name="queryless_requests",
        contract="A request without query rows changes nothing for the others.",
        make=_queryless,
        check=check_numbers,
    ),
    Rule(
        name="empty_batch",
        contract="An empty batch is fine.",
        make=_empty,
        check=check_numbers,
    ),
)
