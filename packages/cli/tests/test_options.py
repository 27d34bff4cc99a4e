from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from attn_cli.options import Panel

_panel = Panel("Amounts")
app = typer.Typer()


@app.command()
def show(
    count: Annotated[int, _panel.integer("--count", "A count.")] = 1,
    ratio: Annotated[float, _panel.number("--ratio", "A ratio.", "R")] = 0.5,
    word: Annotated[str, _panel.word("--word", "A word.", "W")] = "",
    is_on: Annotated[bool, _panel.flag("--on", "A switch.", "-o")] = False,
) -> None:
    typer.echo(repr((count, ratio, word, is_on)))


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], (1, 0.5, "", False)),
        (["--count", "-7"], (-7, 0.5, "", False)),
        (["--ratio", "2e3", "--word", "x", "-o"], (1, 2000.0, "x", True)),
    ],
)
def test_values_arrive_in_their_types(words: list[str], values: object) -> None:
    assert CliRunner().invoke(app, words).stdout == f"{values!r}\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--count", "1.0"], "'1.0' is not an integer"),
        (["--count", "many"], "'many' is not an integer"),
        (["--ratio", "half"], "'half' is not a number"),
    ],
)
def test_a_value_of_another_type_is_named(words: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_options_stand_under_the_heading_of_their_panel() -> None:
    assert "Amounts" in CliRunner().invoke(app, ["--help"]).stdout
