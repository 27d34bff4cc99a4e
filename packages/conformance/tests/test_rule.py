from __future__ import annotations

import pytest

from attn_conformance.case import Case
from attn_conformance.fit import Fit
from attn_conformance.reference_backend import REFERENCE_CAPABILITY
from attn_conformance.rule import Depth, Rule
from attn_conformance.subject import Subject


def rule_of(*names: str) -> Rule:
    def make(depth: Depth, fit: Fit) -> list[Case]:
        return [fit.case(f"{name}-{depth}", (1,), (5,)) for name in names]

    return Rule(name="r", contract="It holds.", make=make, check=lambda subject, case: None)


def test_cases_are_made_for_a_depth_and_a_capability() -> None:
    cases = rule_of("a", "b").cases(Depth.FULL, REFERENCE_CAPABILITY)
    assert [case.name for case in cases] == ["a-full", "b-full"]
    assert cases[0].block_size == 4


def test_two_cases_of_one_name_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two cases named 'a-quick'"):
        rule_of("a", "b", "a").cases(Depth.QUICK, REFERENCE_CAPABILITY)


def test_by_default_the_capability_excludes() -> None:
    subject = Subject.find("conformance_backends:Blocks16")
    rule = rule_of("a")
    (case,) = rule.cases(Depth.QUICK, subject.capability)
    assert rule.excluded(subject, case) == ()
    assert [r.code for r in rule.excluded(subject, case.with_fields(has_sinks=True))] == []
    assert [r.code for r in rule.excluded(subject, case.with_fields(head_size=80))] == ["head_size"]
