"""What each first-party backend must run at least, so that a narrowed capability is noticed.

golden/BACKEND.json holds, per rule, a number of quick cases, taken from what the backend promises.
Cases that the machine keeps from being run count, since they do not speak of the backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources

from attn_conformance.outcome import Plan

__all__ = ["golden_of", "shortfalls"]


def golden_of(backend: str) -> Mapping[str, int]:
    """Return rule -> least number of cases; empty for a backend without a list."""
    path = resources.files("attn_conformance").joinpath("golden", f"{backend}.json")
    if not path.is_file():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    return {str(rule): int(count) for rule, count in record["cases"].items()}


def shortfalls(plan: Plan, golden: Mapping[str, int]) -> list[str]:
    """Return a sentence for each planned rule that has fewer cases than the list says."""
    sentences = []
    for rule in plan.contracts:
        entries = plan.of_rule(rule)
        count = sum(not entry.is_excluded or entry.is_machines for entry in entries)
        least = golden.get(rule, 0)
        if count < least:
            reasons = sorted({text for entry in entries for _, text in entry.reasons})
            sentences.append(
                f"{rule}: {count} cases, and {plan.facts['backend']} promises {least}; "
                f"excluded for {'; '.join(reasons) or 'no reason'}"
            )
    return sentences
