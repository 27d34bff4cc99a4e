"""What `attn explain --diff` shows, from the record that it also prints as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from attn_cli.views.layout import section, status_text

__all__ = ["diff_tables"]

Record = Mapping[str, Any]


def diff_tables(record: Record) -> Iterator[RenderableType]:
    """Return for each group of layers both answers, and the candidates that differ."""
    places = [f"{d['asked']} ({d['arch']})" for d in record["devices"]]
    for group in record["groups"]:
        if len(record["groups"]) > 1 or group["name"] != "request":
            yield section(group["name"])
        yield _head(group, places)
        rows = [row for row in group["backends"] if not row["is_same"]]
        if not rows:
            yield Text("every candidate has the same verdict on both", style="dim")
            continue
        yield Text()
        yield _table(rows, places)


def _head(group: Record, places: list[str]) -> Text:
    words = []
    for place, chosen, block in zip(places, group["chosen"], group["block_size"], strict=True):
        style = "bold green" if chosen else "bold red"
        words.append((f"{chosen or 'No backend'}", style))
        words.append((f" on {place}" + (f", block size {block}" if block else "") + "\n", ""))
    return Text.assemble(*words[:-1], (words[-1][0].rstrip("\n"), ""))


def _table(rows: list[Record], places: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    table.add_column("Differs", no_wrap=True)
    for place in places:
        table.add_column(place, ratio=1, overflow="fold")
    for row in rows:
        table.add_row(row["name"], *(_cell(verdict) for verdict in row["verdicts"]))
    return table


def _cell(verdict: Record | None) -> Text:
    if verdict is None:
        return Text("no candidate", style="dim")
    lines = [status_text(verdict["status"])]
    for reason in verdict["reasons"]:
        lines.append(Text(f"{reason['code']} {reason['value']}: {reason['allowed']}"))
    if verdict["detail"]:
        lines.append(Text(verdict["detail"]))
    if verdict["status"] in ("chosen", "eligible"):
        rank = verdict["priority"]
        lines.append(Text("by name only" if rank is None else f"priority {rank}"))
        lines += [Text(f"slow path for {name}") for name in verdict["slow_features"]]
        lines += [Text(f"{path['rows']}: {path['kernel']}") for path in verdict["paths"]]
    return Text("\n").join(lines)
