from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from attn_cli.views.backends import backend_tables


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "attention",
        "status": "provided",
        "provided_by": "attn-x 1.0",
        "family": "mha",
        "vendors": ["amd", "cpu"],
        "description": "does things",
        "is_planned": False,
        "error": None,
        **changes,
    }


def rendered(*rows: dict[str, Any], not_shown: int = 0) -> str:
    console = Console(file=io.StringIO(), width=100, markup=False)
    for part in backend_tables({"backends": rows, "not_shown": not_shown, "failures": []}):
        console.print(part)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_a_provided_backend() -> None:
    assert "NAME attn-x 1.0 does things mha: amd, cpu" in rendered(row("NAME"))


def test_names_that_nothing_provides_say_whether_they_are_planned() -> None:
    text = rendered(
        row("SOON", status="not provided", is_planned=True), row("NEVER", status="not provided")
    )
    assert "SOON planned does things" in text
    assert "NEVER not planned does things" in text


def test_kinds_have_tables_of_their_own() -> None:
    text = rendered(row("A"), row("B", kind="mamba"))
    assert text.index("Attention backend") < text.index("A attn-x") < text.index("Recurrent")


def test_a_third_partys_family_is_not_known() -> None:
    assert "third party: amd, cpu" in rendered(row("NAME", family=None))


def test_what_failed_is_said_once() -> None:
    plugin = {"class": "PluginError", "message": "long words"}
    twice = {"class": "DuplicateNameError", "message": "two claim it"}
    assert "NAME failed does things mha: amd, cpu see below" in rendered(
        row("NAME", status="failed", error=plugin)
    )
    assert "two claim it" in rendered(row("NAME", status="failed", error=twice))


def test_the_number_of_names_left_out() -> None:
    assert "7 more names are known and not provided: attn list --all" in rendered(not_shown=7)
