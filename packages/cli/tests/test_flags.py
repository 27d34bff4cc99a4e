from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from attn_cli.flags import command
from attn_cli.options import Panel
from attn_cli.output import OutputFlags
from attn_shared.errors import VendorMissingError

_panel = Panel("Test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    height: Annotated[int, _panel.integer("--height", "How high.", "H")]
    width: Annotated[int | None, _panel.integer("--width", "How wide.", "W")] = None


seen: list[tuple[Size, OutputFlags]] = []


def measure(size: Size, output: OutputFlags) -> int:
    """Measure a thing."""
    seen.append((size, output))
    if size.width == 0:
        raise VendorMissingError("no ruler.", hint="buy one.")
    return 1 if size.width is None else 0


app = typer.Typer()
app.command()(command(measure))


def test_fields_of_all_dataclasses_become_options() -> None:
    assert CliRunner().invoke(app, ["--height", "3", "--width=4", "-q"]).exit_code == 0
    assert seen[-1] == (Size(height=3, width=4), OutputFlags(quiet=True))


def test_what_the_function_returns_is_the_exit_code() -> None:
    assert CliRunner().invoke(app, ["--height", "3"]).exit_code == 1


def test_a_field_without_default_is_required() -> None:
    result = CliRunner().invoke(app, ["--width", "3"])
    assert (result.exit_code, "--height" in result.stderr) == (2, True)


def test_help_is_made_of_the_docstring_and_the_options() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert "Measure a thing." in text
    assert "How wide." in text
    assert "--json" in text


def test_an_error_gives_its_own_exit_code_and_words() -> None:
    result = CliRunner().invoke(app, ["--height", "3", "--width", "0"])
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr == "Error: no ruler.\nHint: buy one.\n"
