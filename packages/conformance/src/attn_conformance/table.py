"""The report as a table for a terminal, or as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attn_conformance.report import Report, RuleCount

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["failure_lines", "header_lines", "rendered", "tables"]

_SHOWN_REASONS = 3


def header_lines(facts: dict[str, str]) -> list[str]:
    """Return what is tested on what, in a few lines."""
    name = facts["backend"]
    if facts["asked_for"] not in (name, facts["source"]):
        name = f"{name} ({facts['asked_for']})"
    versions = f"torch {facts['torch']}, python {facts['python']}"
    return [
        f"backend: {name} from {facts['source']}",
        f"device: {facts['device']}, dtypes {facts['dtypes']}",
        f"{facts['suite']}, depth {facts['depth']}, {versions}",
    ]


def tables(report: Report) -> Iterator[RenderableType]:
    """Yield the summary: a line per rule, then what is wrong with the run as a whole."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{report.facts['backend']} on {report.facts['device']}", box=None)
    table.add_column("rule", no_wrap=True)
    for name in ("run", "failed", "expected", "excluded"):
        table.add_column(name, justify="right")
    table.add_column("excluded for", overflow="fold")
    for rule in report.rules:
        table.add_row(*_cells(rule))
    table.add_section()
    table.add_row(*_cells(report.total()))
    yield table
    for problem in report.problems:
        yield Text(f"problem: {problem}", style="red")
    verdict = "keeps the contract" if report.ok else "FAILED"
    style = "bold green" if report.ok else "bold red"
    yield Text(f"{report.facts['backend']}: {verdict} ({report.seconds:.1f} s)", style=style)


def _cells(rule: RuleCount) -> list[Text]:
    from rich.text import Text

    style = "red" if rule.failed else "dim" if not rule.run else ""
    numbers = [rule.run, rule.failed, rule.expected, rule.excluded]
    return [
        Text(rule.rule, style=style),
        *(Text(str(number) if number else "-", style=style) for number in numbers),
        Text(_reasons(rule), style="dim"),
    ]


def _reasons(rule: RuleCount) -> str:
    shown = [
        f"{text.partition(' (allowed')[0]} x{count}"
        for text, count in rule.reasons[:_SHOWN_REASONS]
    ]
    more = len(rule.reasons) - _SHOWN_REASONS
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def failure_lines(report: Report) -> Iterator[str]:
    """Yield a paragraph for each failed case."""
    for outcome in report.failures:
        yield f"{outcome.name}: {outcome.message}"


def rendered(report: Report, *, width: int, color: bool) -> str:
    """Return the tables as text.

    Args:
        report: what to show.
        width: columns of the screen.
        color: whether the screen shows colours.
    """
    from rich.console import Console

    screen = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        emoji=False,
        markup=False,
    )
    for table in tables(report):
        screen.print(table)
    file = screen.file
    return file.getvalue() if isinstance(file, io.StringIO) else ""
