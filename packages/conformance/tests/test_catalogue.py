from __future__ import annotations

import pytest
from conformance_backends import Blocks16

from attn_conformance.reference_backend import REFERENCE_CAPABILITY
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules.catalogue import RULES, rules_named
from attn_conformance.subject import Subject
from attn_shared.capability import Capability
from attn_shared.errors import UnknownNameError

CAPABILITIES = {"all": REFERENCE_CAPABILITY, "little": Blocks16.served}


def test_names_are_unique_and_sentences_end() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule.name.isidentifier()
        assert rule.contract.endswith(".")
        assert rule.contract[0].isupper() or rule.contract.split()[0] in _LOWER


_LOWER = ("fp8:", "int8", "forward", "output=None", "e4m3fn", "float32")


def test_rules_are_found_by_name_in_their_order() -> None:
    assert rules_named([]) == RULES
    names = [rule.name for rule in rules_named(["window", "causal"])]
    assert names == ["causal", "window"]
    with pytest.raises(UnknownNameError, match="did you mean 'window'"):
        rules_named(["windows"])


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=CAPABILITIES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_cases_are_the_same_every_time_and_full_has_all_of_quick(
    rule: Rule, capability: Capability
) -> None:
    quick = rule.cases(Depth.QUICK, capability)
    assert quick
    assert rule.cases(Depth.QUICK, capability) == quick
    if rule.name != "generated":
        full = {case.name: case for case in rule.cases(Depth.FULL, capability)}
        assert [full.get(case.name) for case in quick] == list(quick)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_reference_keeps_every_rule(rule: Rule) -> None:
    subject = Subject.find("attn_conformance.reference_backend:ReferenceBackend")
    tried = 0
    for case in rule.cases(Depth.QUICK, subject.capability):
        if not rule.excluded(subject, case):
            rule.check(subject, case)
            tried += 1
    assert tried or rule.name == "no_synchronisation"


def test_a_backend_that_takes_little_is_still_tried_on_most_rules() -> None:
    subject = Subject.find("conformance_backends:Blocks16")
    tried = set()
    for rule in RULES:
        for case in rule.cases(Depth.QUICK, subject.capability):
            if not rule.excluded(subject, case):
                rule.check(subject, case)
                tried.add(rule.name)
    untried = {rule.name for rule in RULES} - tried
    assert untried == {
        "ieee_float32",
        "lse",
        "merged_halves",
        "no_synchronisation",
        "value_head_sizes",
    }
