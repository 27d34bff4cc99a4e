"""The demo for a person, as tables and progress bars, and for a program, as a record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from attn_shared.dtypes import dtype_name
from attn_shared.selection import Selection, VerdictStatus
from attn_transformers.demo_check import Check, Run
from attn_transformers.demo_model import MODEL_NAME, OnProgress
from attn_transformers.demo_run import Answer, DemoResult, Setting

__all__ = ["SCHEMA_VERSION", "Console", "DemoScreen", "to_record"]

SCHEMA_VERSION = 1
"""Version of `to_record`."""

_COLOURS = {
    VerdictStatus.CHOSEN: "bold green",
    VerdictStatus.ELIGIBLE: "green",
    VerdictStatus.REJECTED: "red",
}


class Console(Protocol):
    """What is used of rich.console.Console; rich is imported where something is shown."""

    @property
    def is_terminal(self) -> bool:
        """Whether a person watches."""

    def print(self, *objects: Any, style: str | None = None) -> None:
        """Print text, tables and panels."""


class DemoScreen:
    """Shows the demo on a console as it goes."""

    def __init__(self, console: Console, *, shows_progress: bool, shows_tables: bool) -> None:
        """Show progress, tables, both or nothing."""
        self._console = console
        self._shows_progress = shows_progress
        self._shows_tables = shows_tables

    @contextmanager
    def progress(self, title: str) -> Iterator[OnProgress]:
        """Show a bar while something is done, and remove it afterwards."""
        from rich import progress

        console: Any = self._console
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not (self._shows_progress and self._console.is_terminal),
        )
        with bar:
            task = bar.add_task(title, total=None)
            yield lambda what, done, total: bar.update(
                task, description=f"{title}: {what}", completed=done, total=total or None
            )

    def selected(self, setting: Setting) -> None:
        """Show the device, the model and every verdict."""
        if not self._shows_tables:
            return
        from rich.table import Table

        device, model = setting.device, setting.model
        origin = "converted before" if model.was_cached else "converted now"
        facts = Table.grid(padding=(0, 2))
        facts.add_row("Device", f"{device.name} ({device.arch})")
        facts.add_row("Model", f"{MODEL_NAME}, {dtype_name(setting.dtype)}, {origin}")
        facts.add_row("Folder", str(model.folder))
        self._console.print(facts)
        self._console.print(_verdicts(setting.selection))
        for note in (*setting.notes, *setting.selection.notes()):
            self._console.print(f"note: {note}", style="dim")

    def answered(self, answer: Answer) -> None:
        """Show the generated text, its speed and its memory."""
        if not self._shows_tables:
            return
        from rich.panel import Panel
        from rich.text import Text

        usage = answer.usage
        self._console.print(Panel(Text(answer.text), title=answer.prompt, title_align="left"))
        self._console.print(
            f"{answer.run.num_steps} tokens, {_speed(answer.run)} after a prompt of "
            f"{answer.prompt_tokens} ({answer.run.prefill_s:.2f} s)"
        )
        self._console.print(
            f"paged cache: at most {usage.peak_used_blocks} blocks of {usage.block_size} tokens, "
            f"{usage.peak_used_bytes / 2**20:.1f} MiB in use of "
            f"{usage.allocated_bytes / 2**20:.1f} MiB allocated"
        )

    def finished(self, result: DemoResult) -> None:
        """Show whether the tokens are those of transformers' own attention."""
        if not self._shows_tables:
            return
        self._console.print(f"transformers' sdpa, float32: {_speed(result.stock)}")
        for name, check in _checks(result):
            self._console.print(_check_line(name, check, result))

    def interrupted(self) -> None:
        """Say that nothing is left behind."""
        self._console.print("interrupted; no half-written file is left behind.")


def _verdicts(selection: Selection) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("Backend", "Verdict", "Why", box=None, header_style="bold", pad_edge=False)
    for verdict in selection.verdicts:
        style = _COLOURS.get(verdict.status, "yellow")
        why = verdict.summary()
        if verdict.status is VerdictStatus.CHOSEN:
            place = f"block size {selection.block_size}, KV layout {selection.kv_layout}"
            why = "; ".join(filter(None, (f"by {selection.decided_by}", place, why)))
        table.add_row(verdict.name, Text(str(verdict.status), style), why)
    return table


def _speed(run: Run) -> str:
    return "one token" if run.tokens_per_s is None else f"{run.tokens_per_s:.1f} tokens/s"


def _checks(result: DemoResult) -> tuple[tuple[str, Check], ...]:
    return (
        ("greedy tokens in float32 against transformers' sdpa", result.check),
        ("a padded batch of two prompts", result.batch_check),
    )


def _check_line(name: str, check: Check, result: DemoResult) -> Any:
    from rich.text import Text

    if check.difference is None:
        return Text.assemble((f"equal, {check.num_tokens} tokens", "bold green"), f": {name}")
    found = check.difference
    ours, stock = (
        repr(result.decode(token)) if token >= 0 else "the end" for token in found.tokens
    )
    return Text.assemble(
        (f"different at step {found.step} of row {found.row}", "bold red"),
        f": {name}\n  ours {ours}, {found.gaps[0]:.2e} above the next logit; "
        f"sdpa {stock}, {found.gaps[1]:.2e} above the next",
    )


def to_record(result: DemoResult) -> dict[str, Any]:
    """Return JSON-safe values with a schema version."""
    setting, answer = result.setting, result.answer
    return {
        "schema_version": SCHEMA_VERSION,
        "is_equal": result.is_equal,
        "model": {
            "name": MODEL_NAME,
            "folder": str(setting.model.folder),
            "source": str(setting.model.source),
            "was_cached": setting.model.was_cached,
        },
        "dtype": dtype_name(setting.dtype),
        "selection": setting.selection.to_dict(),
        "notes": list(setting.notes),
        "prompt": answer.prompt,
        "prompt_tokens": answer.prompt_tokens,
        "text": answer.text,
        "tokens": list(answer.run.tokens[0]),
        "prefill_s": answer.run.prefill_s,
        "tokens_per_s": answer.run.tokens_per_s,
        "stock_tokens_per_s": result.stock.tokens_per_s,
        "cache": dataclasses.asdict(answer.usage),
        "check": _check_record(result.check),
        "batch_check": _check_record(result.batch_check),
    }


def _check_record(check: Check) -> dict[str, Any]:
    found = check.difference
    return {
        "is_equal": check.is_equal,
        "num_tokens": check.num_tokens,
        "difference": None if found is None else dataclasses.asdict(found),
    }
