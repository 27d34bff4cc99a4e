"""Recorded decisions of vLLM 0.25.1 beside attn's: each difference has a rule, each rule one."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CI = Path(__file__).parents[1] / "ci"
MODULES = (
    "compare_latents",
    "compare_others",
    "compare_selection",
    "differences",
    "flashinfer_rules",
    "generate_differences",
    "recorded",
    "repository",
    "rocm_rules",
    "selection_rules",
)


@pytest.fixture(scope="module")
def ci() -> Iterator[Any]:
    """The generator, with the modules beside it."""
    sys.path.insert(0, str(CI))
    yield importlib.import_module("generate_differences")
    sys.path.remove(str(CI))
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def report(ci: Any) -> Any:
    recorded = importlib.import_module("recorded")
    if not (recorded.folder() / "decisions.jsonl").is_file():
        pytest.skip("no recorded decisions (ATTN_ORACLE_DIR)")
    return ci.report()


def test_every_difference_is_explained_and_every_rule_explains(ci: Any, report: Any) -> None:
    found, rules = report
    told = list(ci.problems(found, rules))
    assert not told, "\n".join(told)


def test_every_rule_has_a_reason_and_evidence_of_its_own(report: Any) -> None:
    _, rules = report
    assert len({rule.name for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.reason.endswith((".", "?")), rule.name
        assert len(rule.evidence) > 10, rule.name
        assert not rule.evidence.endswith("."), rule.name


def test_the_page_is_current_for_the_rows_that_it_is_of(ci: Any, report: Any) -> None:
    """Other rows (a larger sample, say) have other numbers; the rules hold for them as well."""
    written = ci.PAGE.read_text(encoding="utf-8")
    current = ci.page(*report)
    rows = re.compile(r"^\| (\w+) \| ([\d,]+) \|", re.MULTILINE)
    if rows.findall(written) != rows.findall(current):
        pytest.skip("the page is of other recorded rows")
    assert written == current, f"run: {ci.COMMAND}"


class TestExplaining:
    """The machinery, on made-up differences."""

    def difference(self, **changes: Any) -> Any:
        differences = importlib.import_module("differences")
        plain: dict[str, Any] = {
            "file": "decisions",
            "row": {"id": "d1", "arch": "9.0", "config": {"head_size": 64}},
            "subject": "X",
            "code": "sink",
            "side": "here",
        }
        return differences.Difference(**{**plain, **changes})

    def rule(self, name: str, code: str, *files: str) -> Any:
        differences = importlib.import_module("differences")
        return differences.Rule(
            name=name,
            files=files or ("decisions",),
            reason="a reason.",
            evidence="a measurement",
            explains=lambda d: d.code == code,
        )

    def test_the_first_rule_that_accounts_for_it_gets_it(self, ci: Any) -> None:
        differences = importlib.import_module("differences")
        rules = [self.rule("first", "sink"), self.rule("second", "sink")]
        found = differences.explain([self.difference()], rules)
        assert found.counts == {"first": 1}
        assert found.unused(rules) == ["second"]

    def test_what_no_rule_accounts_for_is_told_with_what_was_asked(self, ci: Any) -> None:
        differences = importlib.import_module("differences")
        rules = [self.rule("other", "alibi"), self.rule("elsewhere", "sink", "forced")]
        found = differences.explain([self.difference()], rules)
        told = list(ci.problems(found, rules))
        assert told[0].startswith("unexplained: decisions d1 9.0: X sink (here)")
        assert "head_size" in told[0]
        assert told[1:] == ["explains nothing: other", "explains nothing: elsewhere"]

    def test_only_the_first_are_told_one_by_one(self, ci: Any) -> None:
        differences = importlib.import_module("differences")
        found = differences.explain([self.difference() for _ in range(20)], [])
        told = list(ci.problems(found, []))
        assert len(told) == ci.SHOWN + 1
        assert told[-1] == "and 8 more"
