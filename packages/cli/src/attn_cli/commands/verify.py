"""`attn verify`: the contract's rules, run on one backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_cli.completion import complete_backend
from attn_cli.installing import missing_package
from attn_cli.options import Panel
from attn_cli.output import OutputFlags, console, emit
from attn_cli.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType

    OnProgress = Callable[[Any, Any], None]
    """Called with the suite's plan, and with an outcome or None. An extra brings their classes."""

__all__ = ["VerifyFlags", "verify"]

_FAILURES_FOUND = 1
_panel = Panel()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFlags:
    """Which backend is tried, where, and how hard."""

    backend: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The backend: a registered name, or module:Class.",
            autocompletion=complete_backend,
        ),
    ]
    depth: Annotated[
        str, _panel.word("--depth", "quick, or full: the same rules on more cases.", "DEPTH")
    ] = "quick"
    device: Annotated[str, _panel.word("--device", "A torch device of this machine.", "NAME")] = (
        "cpu"
    )
    xfails: Annotated[
        str | None, _panel.word("--xfails", "Failures that are known, with reasons.", "FILE")
    ] = None
    rules: Annotated[
        list[str] | None, _panel.word("--rule", "This rule alone; repeatable.", "NAME")
    ] = None
    timeout_s: Annotated[
        float, _panel.number("--timeout", "Time limit of one case, in seconds.", "SECONDS")
    ] = 120.0
    compile_jobs: Annotated[
        int | None,
        _panel.integer(
            "--compile-jobs",
            "Compile the kernels that the cases need first, N at a time (FlashInfer's, Triton's).",
        ),
    ] = None


def verify(flags: VerifyFlags, output: OutputFlags) -> int:
    """Run the contract's rules on a backend, and count what holds, fails and is excluded.

    With --quiet the names of failed cases are all that is printed.
    """
    try:
        from attn_conformance.verify import verify as run
    except ModuleNotFoundError as error:
        raise missing_package("verify", error) from error
    with _progress(output) as on_progress:
        report = run(
            flags.backend,
            depth=flags.depth,
            device=flags.device,
            xfails=flags.xfails,
            rules=flags.rules or (),
            timeout_s=flags.timeout_s,
            compile_jobs=flags.compile_jobs,
            on_progress=on_progress,
        )
    emit(
        {**report.to_dict(), "schema_version": SCHEMA_VERSION},
        output,
        tables=lambda: _tables(report),
        bare=[*(outcome.name for outcome in report.failures), *report.problems],
    )
    return 0 if report.ok else _FAILURES_FOUND


def _tables(report: Any) -> Iterable[RenderableType]:
    from rich.text import Text

    from attn_conformance.table import failure_lines, header_lines, tables

    yield from map(Text, header_lines(report.facts))
    yield from (Text(line, style="red") for line in failure_lines(report))
    yield from tables(report)


@contextmanager
def _progress(output: OutputFlags) -> Iterator[OnProgress]:
    """Show a bar on a terminal's stderr; nothing elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    screen = console(stderr=True)
    is_shown = screen.is_terminal and not output.quiet
    with Progress(*columns, console=screen, transient=True, disable=not is_shown) as bar:
        task = bar.add_task("starting", total=None)

        def advance(plan: Any, outcome: Any) -> None:
            if outcome is None:
                bar.update(task, total=len(plan.entries))
            else:
                bar.update(task, description=outcome.rule, advance=1)

        yield advance
