"""How far a run of the bench is, for a person."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attn_cli.output import OutputFlags, console, warn

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

__all__ = ["RunProgress", "progress_bar"]


class RunProgress:
    """Shows how far a run is: a bar where stderr is a terminal, and problems in any case."""

    def __init__(self, bar: Bar | None, output: OutputFlags) -> None:
        self._bar = bar
        self._output = output
        self._task: TaskID | None = None
        self._done = 0

    def begin(self, total: int) -> None:
        """Start the bar."""
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total)

    def group(self, index: int, name: str) -> None:
        """Say what is measured now."""
        self._done = index
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=index, description=name)

    def round(self, done: int, total: int) -> None:
        """Move on by a part of the group."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done + done / total)

    def problem(self, words: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(words, soft_wrap=True)
        else:
            warn([words], self._output)


@contextmanager
def progress_bar(output: OutputFlags) -> Iterator[RunProgress]:
    """Show a bar on stderr while the block runs, if stderr is a terminal."""
    if output.quiet or not sys.stderr.isatty():
        yield RunProgress(None, output)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        yield RunProgress(bar, output)
