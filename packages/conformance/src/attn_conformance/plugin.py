"""The pytest plugin: `pytest --pyargs attn_conformance --attn-backend NAME`.

Every pytest run of an environment loads this module, so that it imports nothing heavy and does
nothing unless a backend is named. Then each case that the backend's capability admits is a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attn_conformance.expected_failures import ExpectedFailures
    from attn_conformance.outcome import Entry, Outcome
    from attn_conformance.report import Report
    from attn_conformance.suite import Suite

__all__: list[str] = []

_CATALOGUE = Path(__file__).resolve().parent / "rules" / "catalogue.py"
"""The file whose tests the cases are: what `--pyargs attn_conformance` comes by."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("attn", "attn conformance suite")
    group.addoption(
        "--attn-backend",
        metavar="NAME",
        help='backend to test: its name, or "module:Class"',
    )
    group.addoption(
        "--attn-depth", choices=("quick", "full"), default="quick", help="how many cases (quick)"
    )
    group.addoption(
        "--attn-device", metavar="DEVICE", default="cpu", help="torch device to test on (cpu)"
    )
    group.addoption("--attn-xfails", metavar="FILE", help="file of expected failures")
    group.addoption(
        "--attn-rule",
        metavar="NAME",
        action="append",
        default=[],
        help="only this rule; repeatable",
    )
    group.addoption(
        "--attn-timeout", metavar="SECONDS", type=float, help="time limit of a case (120)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the suite if a backend is named."""
    if config.getoption("attn_backend") and not config.option.help:
        config.pluginmanager.register(_SuitePlugin(config), "attn-conformance-suite")


class _SuitePlugin:
    """The suite of one pytest run."""

    def __init__(self, config: pytest.Config) -> None:
        from attn_conformance.suite import DEFAULT_TIMEOUT_S, Suite

        self.config = config
        self.expected = _expected_failures(config)
        self.outcomes: list[Outcome] = []
        self.was_narrowed = False
        try:
            self.suite = Suite(
                config.getoption("attn_backend"),
                depth=config.getoption("attn_depth"),
                device=config.getoption("attn_device"),
                rules=config.getoption("attn_rule"),
                timeout_s=config.getoption("attn_timeout") or DEFAULT_TIMEOUT_S,
            )
        except _attn_error() as error:
            raise pytest.UsageError(str(error)) from error

    def pytest_report_header(self) -> list[str]:
        """Say what is tested on what."""
        from attn_conformance.table import header_lines

        return [f"attn {line}" for line in header_lines(self.suite.plan.facts)]

    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> pytest.Collector | None:
        """Collect the cases in place of the catalogue of rules."""
        if file_path.resolve() != _CATALOGUE:
            return None
        collector: pytest.Collector = _Catalogue.from_parent(parent, path=file_path, plugin=self)
        return collector

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Remember that not all cases are run."""
        self.was_narrowed |= any(isinstance(item, _CaseItem) for item in items)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table of rules."""
        from attn_conformance.table import rendered

        if self.config.option.collectonly:
            return
        terminalreporter.section(f"attn conformance: {self.suite.plan.facts['backend']}")
        screen = terminalreporter._tw
        text = rendered(self.report(), width=screen.fullwidth, color=screen.hasmarkup)
        terminalreporter.write(text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run in which no case failed and something else is wrong."""
        if self.config.option.collectonly or session.exitstatus != pytest.ExitCode.OK:
            return
        if not self.report().ok:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self) -> None:
        """End the worker process."""
        self.suite.close()

    def report(self) -> Report:
        """Count what was run so far."""
        from attn_conformance.outcome import Outcome, Status
        from attn_conformance.report import make_report

        done = {outcome.name for outcome in self.outcomes}
        plan = self.suite.plan
        excluded = [
            Outcome(rule=entry.rule, case=entry.case, status=Status.EXCLUDED)
            for entry in plan.entries
            if entry.is_excluded
        ]
        runnable = {entry.name for entry in plan.entries if not entry.is_excluded}
        is_whole = not self.was_narrowed and done == runnable
        return make_report(plan, [*self.outcomes, *excluded], self.expected, is_whole=is_whole)


def _expected_failures(config: pytest.Config) -> ExpectedFailures:
    from attn_conformance.expected_failures import ExpectedFailures

    path = config.getoption("attn_xfails")
    try:
        return ExpectedFailures() if path is None else ExpectedFailures.read(path)
    except _attn_error() as error:
        raise pytest.UsageError(str(error)) from error


def _attn_error() -> type[Exception]:
    from attn_shared.errors import AttnError

    return AttnError


class _Catalogue(pytest.File):
    """All cases of the plan that are run."""

    def __init__(self, *, plugin: _SuitePlugin, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plugin = plugin

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test for each case that is not excluded."""
        for entry in self.plugin.suite.plan.entries:
            if not entry.is_excluded:
                yield _CaseItem.from_parent(self, name=entry.name, entry=entry)


class _CaseItem(pytest.Item):
    """One case of one rule."""

    def __init__(self, *, entry: Entry, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.entry = entry
        parent = self.parent
        if not isinstance(parent, _Catalogue):
            raise TypeError("a case is made by the catalogue")
        self.plugin = parent.plugin
        line = self.plugin.expected.of(entry)
        if line is not None:
            self.add_marker(pytest.mark.xfail(reason=line.reason, strict=True))

    def runtest(self) -> None:
        """Run the case in the worker process."""
        suite: Suite = self.plugin.suite
        outcome = suite.run(self.entry)
        self.plugin.outcomes.append(self.plugin.expected.judge(self.entry, outcome))
        if outcome.message:
            raise _CaseFailed(outcome.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """Show what was found, the rule and the case, and no traceback of this plugin."""
        if not isinstance(excinfo.value, _CaseFailed):
            return str(super().repr_failure(excinfo))
        contract = self.plugin.suite.plan.contracts[self.entry.rule]
        return f"{excinfo.value}\nrule: {contract}\ncase: {self.entry.words}"

    def reportinfo(self) -> tuple[Path, int, str]:
        """Name the case in reports."""
        return _CATALOGUE, 0, self.name


class _CaseFailed(Exception):
    """A case did not hold."""
