"""What `attn list` shows, from the record that it also prints as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from attn_cli.views.layout import column_table, failures_block

__all__ = ["backend_tables"]

Record = Mapping[str, Any]

_KIND_TITLES = {
    "attention": "Attention backend",
    "mla_prefill": "MLA prefill",
    "mamba": "Recurrent backend",
}


def backend_tables(record: Record) -> Iterator[RenderableType]:
    """Return a table for each kind of backend, and what failed."""
    for kind, title in _KIND_TITLES.items():
        rows = [_row(row) for row in record["backends"] if row["kind"] == kind]
        if rows:
            yield column_table((title, "Provided by", "About"), rows)
    if record["not_shown"]:
        yield Text(
            f"{record['not_shown']} more names are known and not provided: attn list --all",
            style="dim",
        )
    yield from failures_block(record["failures"])


def _row(row: Record) -> tuple[Text, ...]:
    is_provided = row["status"] == "provided"
    name = Text(row["name"], style="bold" if is_provided else "dim")
    return (name, _provider(row), Text("\n").join(_about(row)))


def _provider(row: Record) -> Text:
    match row["status"]:
        case "provided":
            return Text(row["provided_by"], style="green")
        case "failed":
            return Text("failed", style="bold red")
    return Text("planned" if row["is_planned"] else "not planned", style="dim")


def _about(row: Record) -> Iterator[Text]:
    if row["description"]:
        yield Text(row["description"])
    facts = [row["family"] or "third party", ", ".join(row["vendors"])]
    yield Text(": ".join(fact for fact in facts if fact), style="dim")
    error = row["error"]
    if error:
        is_below = error["class"] == "PluginError"
        yield Text("see below" if is_below else error["message"], style="red")
