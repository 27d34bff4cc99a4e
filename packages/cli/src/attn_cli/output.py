"""Where an answer goes: a table or JSON on stdout, a copy in a file, the rest on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attn_cli.options import Panel
from attn_shared.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["OutputFlags", "console", "emit", "show", "warn", "write_file"]

_panel = Panel("Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """The flags that every command has."""

    as_json: Annotated[bool, _panel.flag("--json", "Print JSON instead of tables.")] = False
    output: Annotated[
        str | None, _panel.word("--output", "Also write the JSON to FILE.", "FILE")
    ] = None
    quiet: Annotated[bool, _panel.flag("--quiet", "Print the bare answer, no notes.", "-q")] = False


def console(*, stderr: bool = False) -> Console:
    """Return a console of this moment's stdout or stderr; plain where that is no terminal."""
    from rich.console import Console

    class PipedConsole(Console):
        """A console that lets the caller handle a reader that went away."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipedConsole(stderr=stderr, highlight=False, emoji=False, markup=False)


def emit(
    record: Mapping[str, Any],
    output: OutputFlags,
    *,
    tables: Callable[[], Iterable[RenderableType]],
    bare: Iterable[str],
) -> None:
    """Give an answer in the form that was asked for.

    Args:
        record: the answer as JSON-safe values.
        output: the form.
        tables: makes the answer for a person; only called where that is printed.
        bare: the lines of `--quiet`.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    text = json.dumps(record, indent=2) + "\n"
    if output.output is not None:
        write_file(Path(output.output), text)
    if output.as_json:
        sys.stdout.write(text)
    elif output.quiet:
        sys.stdout.writelines(f"{line}\n" for line in bare)
    else:
        show(tables())


def show(tables: Iterable[RenderableType]) -> None:
    """Print tables on stdout."""
    screen = console()
    for table in tables:
        screen.print(table)


def warn(lines: Iterable[str], output: OutputFlags) -> None:
    """Say on stderr what the answer's reader may not see; nothing with `--quiet`."""
    if not output.quiet:
        sys.stderr.writelines(f"{line}\n" for line in lines)


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        InvalidInputError: it cannot be written; holds the system's words.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a device or a pipe must not be replaced
        else:
            _replace(path, text)
    except OSError as error:
        raise InvalidInputError.for_argument(
            "--output", f"{str(path)!r} ({error.strerror})", "a file that can be written"
        ) from error


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
