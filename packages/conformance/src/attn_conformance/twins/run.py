"""Run the suite's rules on backends that break them, and see that each is caught."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from attn_conformance.case import Case
from attn_conformance.outcome import MACHINE_CODES, Outcome
from attn_conformance.rule import Depth, Rule, Violation
from attn_conformance.rules.catalogue import rules_named
from attn_conformance.subject import Subject
from attn_conformance.suite import Suite
from attn_conformance.twins.catalogue import MLA_TWINS, TWINS
from attn_conformance.twins.mla import MLATwin
from attn_conformance.twins.twin import Twin
from attn_shared.backend import AttentionBackend
from attn_shared.capability import Reason
from attn_shared.device import preset
from attn_shared.inventory import Inventory

__all__ = ["AnyTwin", "Finding", "Verdict", "run_twin", "run_twins", "subject_of"]

AnyTwin = type[Twin] | type[MLATwin]

_TIMEOUT_S = 3.0  # of a case of a twin that hangs; right ones take some milliseconds


class Verdict(StrEnum):
    """What became of a twin under one rule."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    """Every case passed: the rule is too weak, or the twin is not broken."""
    MISTAKEN = "mistaken"
    """It failed by an error that is no violation, and should not: the twin is at fault."""
    NOT_RUN = "not run"
    """This machine cannot show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A twin, a rule, and what came of them.

    Attributes:
        twin: the twin's class name.
        rule: name of the rule.
        verdict: what became of it.
        case: the case that decided, or "".
        words: what the suite said there.
    """

    twin: str
    rule: str
    verdict: Verdict
    case: str = ""
    words: str = ""


def run_twins(
    twins: Iterable[AnyTwin] = (*TWINS, *MLA_TWINS), device: str = "cpu"
) -> Iterator[Finding]:
    """Run each twin on the rules that it breaks, at quick depth.

    Args:
        twins: which ones.
        device: a torch device of this machine.
    """
    for twin in twins:
        yield from run_twin(twin, device)


def run_twin(twin: AnyTwin, device: str = "cpu") -> Iterator[Finding]:
    """Run a twin on the rules that it breaks; cases after the first that fails are left out."""
    if twin.ends_process:
        yield from _run_apart(twin, device)
        return
    subject = subject_of(twin, device)
    for rule in rules_named(twin.breaks):
        yield _finding(subject, twin, rule)


def subject_of(twin: type[AttentionBackend], device: str = "cpu") -> Subject:
    """Return a twin ready to be run; on a CPU no platform has to be installed for it."""
    if device != "cpu":
        return Subject.find(_path(twin), device)
    return Subject(
        name=twin.__qualname__,
        source=twin.__module__,
        backend=twin,
        device=torch.device(device),
        facts=replace(preset("genericcpu"), memory_bytes=_memory_bytes()),
        inventory=Inventory(),
    )


def _path(twin: type[AttentionBackend]) -> str:
    return f"{twin.__module__}:{twin.__qualname__}"


def _memory_bytes() -> int | None:
    """Return this machine's memory, which decides whether a far block can be had."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None


def _finding(subject: Subject, twin: AnyTwin, rule: Rule) -> Finding:
    reasons: list[Reason] = []
    for case in rule.cases(Depth.QUICK, subject.capability, subject.facts):
        excluded = rule.excluded(subject, case)
        reasons += excluded
        if excluded:
            continue
        verdict, words = _tried(subject, rule, case)
        if verdict is Verdict.MISTAKEN and twin.raises:
            verdict = Verdict.CAUGHT
        if verdict is not Verdict.SURVIVED:
            return _of(twin, rule.name, verdict, case.name, words)
    lies_in_machine = reasons and all(reason.code in MACHINE_CODES for reason in reasons)
    verdict = Verdict.NOT_RUN if lies_in_machine else Verdict.SURVIVED
    return _of(twin, rule.name, verdict, words="; ".join(sorted({str(item) for item in reasons})))


def _of(twin: AnyTwin, rule: str, verdict: Verdict, case: str = "", words: str = "") -> Finding:
    return Finding(twin=twin.__name__, rule=rule, verdict=verdict, case=case, words=words)


def _tried(subject: Subject, rule: Rule, case: Case) -> tuple[Verdict, str]:
    torch.manual_seed(0)
    try:
        rule.check(subject, case)
    except Violation as error:
        return Verdict.CAUGHT, str(error)
    except Exception as error:  # noqa: BLE001 - a twin may raise anything, on purpose or not
        return Verdict.MISTAKEN, f"{type(error).__name__}: {error}"
    return Verdict.SURVIVED, ""


def _run_apart(twin: AnyTwin, device: str) -> Iterator[Finding]:
    """Run a twin that ends its process: the named cases must fail, and all others must pass."""
    with Suite(_path(twin), device=device, rules=twin.breaks, timeout_s=_TIMEOUT_S) as suite:
        outcomes = [suite.run(entry) for entry in suite.plan.entries]
    for rule in twin.breaks:
        yield _contained(twin, rule, [outcome for outcome in outcomes if outcome.rule == rule])


def _contained(twin: AnyTwin, rule: str, outcomes: list[Outcome]) -> Finding:
    for outcome in outcomes:
        if outcome.status.is_failure != (outcome.case in twin.fails):
            words = outcome.message or "passed"
            return _of(twin, rule, Verdict.SURVIVED, outcome.case, words)
    failed = [outcome for outcome in outcomes if outcome.status.is_failure]
    if len(failed) < len(twin.fails):
        return _of(twin, rule, Verdict.SURVIVED)
    words = "; ".join(outcome.message for outcome in failed)
    return _of(twin, rule, Verdict.CAUGHT, failed[0].case, words)
