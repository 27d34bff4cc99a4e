"""TRITON_MLA keeps the contract: cases of every rule under the interpreter, all on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attn_conformance.outcome import Status
from attn_conformance.rules.catalogue import MLA_RULES
from attn_conformance.suite import Suite
from attn_conformance.verify import verify

_INTERPRETED = "interpreted_latents:InterpretedLatents"
_FEW = 2  # cases of a rule: the interpreter takes 10 ms for a tile that a GPU takes in 1 us
_MORE = {  # of rules whose cases are alike in time and not in what they try
    "mla_layer": 11,
    "mla_unserved": 11,
    "mla_decode_input": 19,
    "mla_prefill_input": 12,
    "mla_fp8": 4,
    "mla_heads": 6,
    "mla_padded_requests": 5,
    "mla_widths": 3,
}
_ELSEWHERE = frozenset({"mla_no_synchronisation"})
"""Rules that have no case without a GPU."""


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    with Suite(_INTERPRETED) as started:
        yield started


@pytest.mark.interpreter
@pytest.mark.parametrize("rule", [rule.name for rule in MLA_RULES])
def test_a_few_cases_of_a_rule(suite: Suite, rule: str) -> None:
    entries = [x for x in suite.plan.entries if x.rule == rule and not x.is_excluded]
    outcomes = [suite.run(entry) for entry in entries[: _MORE.get(rule, _FEW)]]
    assert [f"{x.case}: {x.message}" for x in outcomes if x.status is not Status.PASSED] == []
    assert outcomes or rule in _ELSEWHERE


@pytest.mark.cuda
def test_the_contract_on_a_gpu() -> None:
    report = verify("TRITON_MLA", device="cuda:0")
    assert [f"{item.name}: {item.message}" for item in report.failures] == []
    assert report.problems == ()
