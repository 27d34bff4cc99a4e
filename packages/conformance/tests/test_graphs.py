from __future__ import annotations

import pytest

from attn_conformance.report import Report
from attn_conformance.verify import verify

RULES = ("causal", "extend", "graph_level", "capture_pointers", "replay", "no_synchronisation")


def cases(report: Report, rule: str) -> int:
    return next(count.run for count in report.rules if count.rule == rule)


def test_a_backend_that_can_be_captured_is_replayed_with_new_contents() -> None:
    report = verify("conformance_backends:Graphed", rules=RULES)
    assert [f"{item.name}: {item.message}" for item in report.failures] == []
    assert cases(report, "replay") == cases(report, "capture_pointers") == 5
    assert cases(report, "no_synchronisation") == 0


def test_metadata_that_keeps_a_copy_is_caught_by_its_pointers_and_by_its_answer() -> None:
    report = verify("conformance_backends:Stale", rules=RULES)
    failed = {outcome.name: outcome.message for outcome in report.failures}
    assert len(failed) == 10  # all cases of two rules
    moved, replayed = failed["capture_pointers[decode-plain]"], failed["replay[decode-plain]"]
    assert moved.startswith("tensors moved after capture: metadata.block_table in")
    assert replayed.startswith("replay with new contents: output")


@pytest.mark.cuda
def test_on_a_gpu_it_is_a_graph_that_is_replayed() -> None:
    report = verify("conformance_backends:Graphed", device="cuda:0", rules=RULES)
    assert [f"{item.name}: {item.message}" for item in report.failures] == []
    assert cases(report, "replay") == 5
    assert cases(report, "no_synchronisation") == 3


@pytest.mark.cuda
def test_on_a_gpu_a_stale_graph_is_caught() -> None:
    report = verify("conformance_backends:Stale", device="cuda:0", rules=("replay",))
    assert len(report.failures) == 5
