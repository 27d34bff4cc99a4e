"""The suite catches every broken twin, and finds no fault with what is not broken."""

from __future__ import annotations

import inspect

import pytest

from attn_conformance.mla_reference_backend import MLAReferenceBackend
from attn_conformance.reference_backend import ReferenceBackend
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules.catalogue import MLA_RULES, RULES
from attn_conformance.twins.by_request import ByRequest, Unbroken
from attn_conformance.twins.catalogue import MLA_TWINS, TWINS
from attn_conformance.twins.run import Verdict, run_twin, subject_of
from attn_conformance.twins.twin import Twin

OF_BY_REQUEST = {name for twin in TWINS if issubclass(twin.impl, ByRequest) for name in twin.breaks}


@pytest.mark.parametrize("twin", [*TWINS, *MLA_TWINS], ids=lambda twin: twin.__name__)
def test_every_rule_catches_its_twins(twin: type[Twin]) -> None:
    findings = list(run_twin(twin))

    wrong = [item for item in findings if item.verdict in (Verdict.SURVIVED, Verdict.MISTAKEN)]
    assert not wrong
    not_run = [f"{item.rule}: {item.words}" for item in findings if item.verdict is Verdict.NOT_RUN]
    if not_run:
        pytest.skip("; ".join(not_run))


def test_every_rule_has_a_twin() -> None:
    for rules, twins in ((RULES, TWINS), (MLA_RULES, MLA_TWINS)):
        broken = {name for twin in twins for name in twin.breaks}
        assert {rule.name for rule in rules} == broken


def test_only_rules_of_devices_have_no_twin_on_a_cpu() -> None:
    here = {name for twin in TWINS if not twin.needs_cuda for name in twin.breaks}

    assert {rule.name for rule in RULES} - here == {"no_synchronisation"}
    here = {name for twin in MLA_TWINS if not twin.needs_cuda for name in twin.breaks}
    assert {rule.name for rule in MLA_RULES} - here == {"mla_no_synchronisation"}


def test_twins_have_names_and_words_of_their_own() -> None:
    names = [twin.__name__ for twin in (*TWINS, *MLA_TWINS)]
    words = [inspect.getdoc(twin) for twin in (*TWINS, *MLA_TWINS)]

    assert len(set(names)) == len(names)
    assert len(set(words)) == len(words)


def run_all(backend: type[ReferenceBackend] | type[MLAReferenceBackend], rule: Rule) -> int:
    """Run all quick cases of a rule; return how many the machine admits."""
    subject = subject_of(backend)
    count = 0
    for case in rule.cases(Depth.QUICK, subject.capability):
        if not rule.excluded(subject, case):
            rule.check(subject, case)
            count += 1
    return count


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_reference_passes_every_rule(rule: Rule) -> None:
    assert run_all(ReferenceBackend, rule) or rule.name == "no_synchronisation"


@pytest.mark.parametrize("rule", MLA_RULES, ids=lambda rule: rule.name)
def test_the_reference_of_latents_passes_every_rule(rule: Rule) -> None:
    assert run_all(MLAReferenceBackend, rule) or rule.name == "mla_no_synchronisation"


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.name in OF_BY_REQUEST], ids=lambda rule: rule.name
)
def test_what_twins_are_made_of_passes_the_rules_that_they_break(rule: Rule) -> None:
    assert run_all(Unbroken, rule)
