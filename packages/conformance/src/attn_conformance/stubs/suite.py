"""The suite in this process, where the stubs are, on a backend of a device that is not here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from attn_conformance.case import Case
from attn_conformance.outcome import Outcome, Status
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules.catalogue import rules_named
from attn_conformance.subject import Subject
from attn_shared.backend import AttentionBackend
from attn_shared.device import DeviceFacts
from attn_shared.errors import own_words
from attn_shared.inventory import VendorSpec, probe, scan

__all__ = ["run_rules", "stubbed_subject"]


def stubbed_subject(
    backend: type[AttentionBackend], device: DeviceFacts, specs: Iterable[VendorSpec] = ()
) -> Subject:
    """Return a subject with a device's capability, and tensors on the CPU.

    Its libraries are found and probed as on that device; call it where their stubs are installed.

    Args:
        backend: the class.
        device: what it is told that it runs on.
        specs: how its libraries are found; by default as the class itself says.
    """
    declared = tuple(specs) or backend.vendor_specs
    names = [spec.name for spec in declared if spec.name in backend.vendor_libraries]
    inventory = probe(declared, names, scan(declared))
    if backend.vendor_libraries:
        backend.load_vendor(device, inventory)
    return Subject(
        name=backend.name,
        source="stubs",
        backend=backend,
        device=torch.device("cpu"),
        facts=device,
        inventory=inventory,
    )


def run_rules(
    subject: Subject, rules: Collection[str] = (), depth: Depth = Depth.QUICK
) -> Iterator[Outcome]:
    """Yield what becomes of each case, excluded ones included, in this very process.

    Args:
        subject: what is tried.
        rules: names of rules; all of them by default.
        depth: how many cases.
    """
    for rule in rules_named(rules, is_mla=subject.capability.is_mla):
        for case in rule.cases(depth, subject.capability, subject.facts):
            yield _outcome(subject, rule, case)


def _outcome(subject: Subject, rule: Rule, case: Case) -> Outcome:
    reasons = rule.excluded(subject, case)
    if reasons:
        words = "; ".join(map(str, reasons))
        return Outcome(rule=rule.name, case=case.name, status=Status.EXCLUDED, message=words)
    torch.manual_seed(0)
    try:
        rule.check(subject, case)
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is a failed case
        words = own_words(error)
        return Outcome(rule=rule.name, case=case.name, status=Status.FAILED, message=words)
    return Outcome(rule=rule.name, case=case.name, status=Status.PASSED)
