"""What `attn explain NAME` shows, from the record that it also prints as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from attn_cli.views.layout import column_table

__all__ = ["names_tables"]

Record = Mapping[str, Any]

_LIMITS = (
    ("devices", "devices"),
    ("dtypes", "dtypes"),
    ("head_sizes", "head sizes"),
    ("head_sizes_v", "value heads"),
    ("block_sizes", "blocks"),
    ("kv_cache_dtypes", "cache formats"),
    ("attn_types", "attention"),
)


def names_tables(record: Record) -> Iterator[RenderableType]:
    """Return what a name elsewhere stands for, and the facts of each backend."""
    foreign = record["from"]
    if foreign is not None:
        names = ", ".join(row["name"] for row in record["backends"]) or "nothing that attn has"
        yield Text.assemble((f"{foreign['origin']}:{foreign['name']}", "bold"), f" is {names}")
        if foreign["flash_attn_version"] is not None:
            yield Text(f"with FlashAttention {foreign['flash_attn_version']}")
        if foreign["note"]:
            yield Text(foreign["note"], style="dim")
    for row in record["backends"]:
        yield Text()
        yield Text.assemble((row["name"], "bold"), f"  {row['status']}")
        yield column_table(("Fact", ""), list(_facts(row)))


def _facts(row: Record) -> Iterator[tuple[str, Text]]:
    facts = {
        "kernels": row["description"],
        "kind": f"{row['kind']}, {row['family'] or 'third party'}",
        "for": ", ".join(row["vendors"]),
        "provided by": row["provided_by"],
        "plan": row["plan"],
        "error": row["error"]["message"] if row["error"] else None,
        "elsewhere": "; ".join(f"{key}: {', '.join(v)}" for key, v in row["elsewhere"].items()),
        "limits of": row["limits_of"],
        "limits": row["limits_error"],
    }
    yield from ((key, Text(str(value))) for key, value in facts.items() if value)
    limits = row["limits"]
    if limits is None:
        return
    for key, title in _LIMITS:
        value = limits[key]
        if value:
            text = ", ".join(value) if isinstance(value, list) else str(value)
            if key == "block_sizes" and limits["max_block_size"] is not None:
                text += f", at most {limits['max_block_size']}"
            yield (title, Text(text))
    served = [name for name, support in limits["features"].items() if support != "no"]
    yield ("serves", Text(", ".join(served) or "nothing beyond the plain case"))
