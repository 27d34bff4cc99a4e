"""A model's selection as tables: a line per group of layers, or every verdict of each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from attn_cli.views.layout import column_table, notes_block, section
from attn_cli.views.selection import asked, choice, kernel_paths, verdicts
from attn_shared.dtypes import dtype_name
from attn_shared.model_selection import GroupSelection, ModelSelection

__all__ = ["bytes_text", "layer_ranges", "model_brief", "model_full"]


def model_brief(answer: ModelSelection) -> Iterator[RenderableType]:
    """Return the choice, a line per group of layers, and what the caches cost."""
    yield _head(answer)
    yield Text()
    yield column_table(
        ("Layers", "Backend", "Per token", "What"), [_row(group) for group in answer.groups]
    )
    yield Text()
    yield _memory(answer)
    yield Text()
    yield notes_block(answer.notes)


def model_full(answer: ModelSelection) -> Iterator[RenderableType]:
    """Return `model_brief`, and each group's request with every verdict on it."""
    yield from model_brief(answer)
    for group in answer.groups:
        yield section(f"{group.group.name}, layers {layer_ranges(group.group.layers)}")
        if group.selection is None:
            kept = bytes_text(group.state_bytes_per_sequence)
            yield Text(f"keeps {kept} per sequence; no backend is chosen")
            continue
        yield asked(group.selection.request)
        yield choice(group.selection)
        yield Text()
        yield from kernel_paths(group.selection)
        yield verdicts(group.selection)


def _head(answer: ModelSelection) -> Text:
    model = answer.model
    place = next((g.selection.device for g in answer.groups if g.selection is not None), None)
    ranks = "1 rank" if model.tp_size == 1 else f"a rank of {model.tp_size}"
    words = [f"{model.model_type}, {ranks}, {dtype_name(model.dtype)}"]
    if place is not None:
        words.append(f" on {place.name} ({place.arch})")
    if answer.block_size is not None:
        words.append(f"\nblock size {answer.block_size} for every cache")
    names = ", ".join(answer.backends) or "no backend is needed"
    return Text.assemble((names, "bold green"), "\n", *words)


def _row(group: GroupSelection) -> tuple[RenderableType, ...]:
    name = "recurrent" if group.selection is None else str(group.selection.chosen)
    kept = group.cache_bytes_per_token
    return (str(len(group.group.layers)), name, bytes_text(kept) if kept else "-", _what(group))


def _what(group: GroupSelection) -> Text:
    parts = [group.group.name]
    request = group.group.request
    if request is not None:
        kv_heads = f"{request.num_kv_heads} kv" if request.mla is None else "1 latent"
        parts.append(f"{request.num_heads}/{kv_heads} heads of {request.head_size}")
    if request is not None and request.has_sinks:
        parts.append("sinks")
    if request is not None and request.softcap is not None:
        parts.append(f"softcap {request.softcap:g}")
    if group.prefill is not None:
        parts.append(f"prefilled by {group.prefill.chosen}")
    if group.kept_tokens is not None:
        parts.append(f"keeps {group.kept_tokens} tokens")
    if group.group.sharing_layers:
        parts.append(f"{len(group.group.sharing_layers)} share a cache")
    if group.group.state is not None:
        parts.append(f"{bytes_text(group.state_bytes_per_sequence)} per sequence")
    return Text(", ".join(parts))


def _memory(answer: ModelSelection) -> Text:
    lines = []
    if answer.cache_bytes_per_token:
        lines.append(f"cache: {bytes_text(answer.cache_bytes_per_token)} per token and rank")
        if answer.long_bytes_per_token != answer.cache_bytes_per_token:
            lines[-1] += f", {bytes_text(answer.long_bytes_per_token)} once the windows are full"
    if answer.state_bytes_per_sequence:
        lines.append(f"states: {bytes_text(answer.state_bytes_per_sequence)} per sequence and rank")
    length = answer.model.max_model_len
    if length is not None and (answer.cache_bytes_per_token or answer.state_bytes_per_sequence):
        lines.append(f"a sequence of {length} tokens: {bytes_text(answer.bytes_at(length))}")
    return Text("\n".join(lines) or "nothing is cached")


def bytes_text(count: int) -> str:
    """Return a number of bytes as a person reads it: exact below 1 KiB, else with its unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def layer_ranges(layers: tuple[int, ...]) -> str:
    """Return "0-4, 6, 8-9" of numbers in order."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
