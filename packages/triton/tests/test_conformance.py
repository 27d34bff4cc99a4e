"""TRITON_ATTN keeps the contract: a few cases of every rule under the interpreter, all on a GPU."""

from __future__ import annotations

from collections import defaultdict

import pytest

from attn_conformance.outcome import Entry, Status
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
_SLOW = ("block_sizes", "many_requests", "head_sizes", "ieee_float32", "long_context")  # one case


def chosen(entries: tuple[Entry, ...]) -> list[Entry]:
    """Return the leading cases of each rule that are not excluded."""
    by_rule: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if not entry.is_excluded:
            by_rule[entry.rule].append(entry)
    return [
        entry
        for rule, found in by_rule.items()
        for entry in found[: 1 if rule in _SLOW else _MORE.get(rule, _FEW)]
    ]


@pytest.mark.interpreter
def test_a_few_cases_of_every_rule() -> None:
    with Suite(_INTERPRETED) as suite:
        outcomes = [suite.run(entry) for entry in chosen(suite.plan.entries)]
    failed = [f"{x.rule} {x.case}: {x.message}" for x in outcomes if x.status is not Status.PASSED]
    assert failed == []
    assert len({outcome.rule for outcome in outcomes}) > 50


@pytest.mark.cuda
def test_the_contract_on_a_gpu() -> None:
    report = verify("TRITON_ATTN", device="cuda:0")
    assert [f"{item.name}: {item.message}" for item in report.failures] == []
    assert report.problems == ()
