"""`attn matrix`: every backend on every architecture, feature by feature."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attn_cli.completion import complete_backend, complete_device
from attn_cli.options import Panel
from attn_cli.output import OutputFlags, emit, warn, write_file
from attn_shared.errors import InvalidInputError, UnknownNameError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attn_cli.matrix.survey import AskedDevice, Matrix
    from attn_shared.selector import Selector

__all__ = ["MatrixFlags", "MatrixOutput", "matrix"]

_FORMATS = ("table", "markdown", "json", "html")
_panel = Panel()


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFlags:
    """Whom `attn matrix` asks, where, and how it answers."""

    backends: Annotated[
        list[str] | None,
        _panel.word(
            "--backend",
            "This backend alone; repeatable. Default: every installed one.",
            "NAME",
            autocompletion=complete_backend,
        ),
    ] = None
    devices: Annotated[
        list[str] | None,
        _panel.word(
            "--device",
            "A preset, an architecture or a device of this machine; repeatable. Default: every "
            "preset.",
            "NAME",
            autocompletion=complete_device,
        ),
    ] = None
    format: Annotated[str, _panel.word("--format", "table, markdown, json or html.", "FORMAT")] = (
        "table"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOutput(OutputFlags):
    """As every command's, but that the file gets the format that was asked for."""

    output: Annotated[
        str | None,
        Panel("Output").word(
            "--output",
            "With markdown or html: write the page to FILE and print nothing. Else: also write "
            "the JSON to FILE.",
            "FILE",
        ),
    ] = None


def matrix(flags: MatrixFlags, output: MatrixOutput) -> int:
    """Show what each backend serves on each architecture, and what was run.

    Each answer is the selector's to a request that asks for one feature.
    Markdown, JSON and HTML also give the limit behind each no.
    With --quiet a line is printed per backend and device.
    """
    from attn_cli.matrix.hardware_runs import known_runs
    from attn_cli.matrix.survey import survey
    from attn_shared.selector import DEFAULT_SELECTOR

    form = _form(flags, output)
    found = survey(
        DEFAULT_SELECTOR,
        devices=_devices(flags, DEFAULT_SELECTOR),
        backends=_backends(flags, DEFAULT_SELECTOR),
        runs=known_runs(),
    )
    if form in ("markdown", "html"):
        _give_page(found, form, output)
        return 0
    from attn_cli.matrix.record import matrix_record

    emit(
        matrix_record(found),
        replace(output, as_json=form == "json"),
        tables=lambda: _tables(found),
        bare=_bare(found),
    )
    return 0


def _form(flags: MatrixFlags, output: OutputFlags) -> str:
    if flags.format not in _FORMATS:
        raise UnknownNameError.for_name("format", flags.format, _FORMATS)
    if not output.as_json:
        return flags.format
    if flags.format not in ("table", "json"):
        raise InvalidInputError.for_argument(
            "--format", flags.format, "json with --json", hint="leave one of them out."
        )
    return "json"


def _devices(flags: MatrixFlags, selector: Selector) -> tuple[AskedDevice, ...]:
    from attn_cli.devices import named_device
    from attn_cli.matrix.survey import AskedDevice

    if not flags.devices:
        return AskedDevice.presets()
    return tuple(
        AskedDevice(name=name, facts=named_device(name, selector))
        for name in dict.fromkeys(flags.devices)
    )


def _backends(flags: MatrixFlags, selector: Selector) -> tuple[str, ...]:
    """Return the names that were asked for, each of which somebody provides."""
    for name in flags.backends or ():
        selector.registry.get(name)
    return tuple(dict.fromkeys(flags.backends or selector.registry.names()))


def _give_page(found: Matrix, form: str, output: OutputFlags) -> None:
    from attn_cli.matrix.html_page import html_page
    from attn_cli.matrix.markdown import markdown_page

    page = html_page(found) if form == "html" else markdown_page(found)
    if output.output is None:
        sys.stdout.write(page)
        return
    write_file(Path(output.output), page)
    warn([f"wrote {output.output}"], output)


def _tables(found: Matrix) -> Iterable[RenderableType]:
    from attn_cli.views.matrix import matrix_tables

    return matrix_tables(found)


def _bare(found: Matrix) -> Iterator[str]:
    for backend, sheets in found.sheets.items():
        for sheet in sheets:
            run = "run" if sheet.is_run else "not-run"
            yield f"{backend} {sheet.device.name} {sheet.base.answer} {run}"
