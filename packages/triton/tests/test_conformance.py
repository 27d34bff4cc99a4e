"""TRITON_ATTN keeps the contract: a few cases of every rule under the interpreter, all on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attn_conformance.outcome import Status
from attn_conformance.rules.catalogue import RULES
from attn_conformance.suite import Suite
from attn_conformance.verify import verify

_INTERPRETED = "interpreted_backend:InterpretedBackend"
_FEW = 2  # cases of a rule: the interpreter takes 10 ms for a tile that a GPU takes in 1 us
_MORE = {  # of rules whose cases are alike in time and not in what they try
    "window": 8,
    "two_sided_window": 9,
    "multimodal_ranges": 6,
    "chunked_local": 6,
    "per_request_causality": 4,
    "value_head_sizes": 7,
    "padded_requests": 11,
    "lse": 12,
    "layouts": 6,
    "output_in_place": 3,
    "replay": 7,
    "wrong_input": 40,
    "construction": 40,
    "unsupported_option": 40,
    "malformed_layer": 9,
}
_SLOW = frozenset(
    {
        "block_sizes",
        "generated",
        "gqa",
        "head_sizes",
        "ieee_float32",
        "large_logits",
        "long_context",
        "many_requests",
    }
)
"""Rules of which one case is run."""
_ELSEWHERE = frozenset({"no_synchronisation"})
"""Rules that have no case without a GPU."""


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    with Suite(_INTERPRETED) as started:
        yield started


@pytest.mark.interpreter
@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_a_few_cases_of_a_rule(suite: Suite, rule: str) -> None:
    entries = [x for x in suite.plan.entries if x.rule == rule and not x.is_excluded]
    count = 1 if rule in _SLOW else _MORE.get(rule, _FEW)
    outcomes = [suite.run(entry) for entry in entries[:count]]
    assert [f"{x.case}: {x.message}" for x in outcomes if x.status is not Status.PASSED] == []
    assert outcomes or rule in _ELSEWHERE


@pytest.mark.cuda
def test_the_contract_on_a_gpu() -> None:
    report = verify("TRITON_ATTN", device="cuda:0")
    assert [f"{item.name}: {item.message}" for item in report.failures] == []
    assert report.problems == ()
