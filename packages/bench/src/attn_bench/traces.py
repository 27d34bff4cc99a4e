"""One's own workloads in a file.

A trace is a text file of JSON lines. The first line is a header with the layer's shape:

    {"attn_trace": 1, "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}

Each further line is one step:

    {"query_lens": [1, 1, 512], "seq_lens": [900, 4000, 512], "label": "noon"}

Optional in the header: kv_cache_dtype, block_size (null: the backend's preferred one). Optional in
a step: label, which no other step may have, and shared_prefix_len. Blank lines are skipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from attn_bench.workloads import Heads, Workload, WorkloadPhase
from attn_shared.dtypes import dtype_name, parse_dtype, parse_kv_cache_dtype
from attn_shared.errors import AttnError, InvalidInputError

__all__ = ["TRACE_VERSION", "read_trace", "write_trace"]

TRACE_VERSION = 1

_HEADER = {
    "attn_trace": int,
    "num_heads": int,
    "num_kv_heads": int,
    "head_size": int,
    "dtype": str,
}
_HEADER_OPTIONAL = {"kv_cache_dtype": str, "block_size": int | None}
_STEP = {"query_lens": list, "seq_lens": list}
_STEP_OPTIONAL = {"label": str, "shared_prefix_len": int}

_WORDS = {int: "an integer", str: "a string", list: "a list of integers"}


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a file, which every complaint names."""

    path: Path
    number: int
    text: str

    def parse(self, needed: dict[str, Any], optional: dict[str, Any]) -> dict[str, Any]:
        """Return the line's object, with every key of a type that it may have."""
        try:
            record = json.loads(self.text)
        except json.JSONDecodeError as error:
            self.refuse(f"not JSON ({error.msg})", "one JSON object per line", error)
        if not isinstance(record, dict):
            self.refuse(repr(record), "a JSON object")
        missing, unknown = needed.keys() - record.keys(), record.keys() - (needed | optional).keys()
        if missing or unknown:
            self.refuse(
                f"missing {sorted(missing)}, unknown {sorted(unknown)}",
                f"the keys {sorted(needed)}, and optionally {sorted(optional)}",
            )
        for key, kind in (needed | optional).items():
            if key in record and not _is_of(record[key], kind):
                words = _WORDS.get(kind, "an integer or null")
                self.refuse(f"{key}={record[key]!r}", words)
        return record

    def refuse(self, value: str, allowed: str, cause: Exception | None = None) -> NoReturn:
        """Say where something is wrong, and what is allowed there."""
        where = f"{self.path}, line {self.number}"
        raise InvalidInputError.for_argument(where, value, allowed) from cause


def _is_of(value: object, kind: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, list):
        return kind is list and all(type(item) is int for item in value)
    return isinstance(value, kind)


def read_trace(path: Path) -> tuple[Workload, ...]:
    """Return the steps of a trace.

    Raises:
        InvalidInputError: the file cannot be read, or a line is not what the format says; names
            file, line and value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError.for_argument(
            "trace", f"{str(path)!r} ({error})", "a text file that can be read"
        ) from error
    lines = [
        _Line(path, number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if len(lines) < 2:
        raise InvalidInputError.for_argument(
            str(path), f"{len(lines)} lines", "a header line and at least one step"
        )
    header = _read_header(lines[0])
    steps = tuple(_read_step(header, line) for line in lines[1:])
    _check_labels(steps, lines[1:])
    return steps


def _read_header(line: _Line) -> dict[str, Any]:
    """Return the fields that all steps share."""
    header = line.parse(_HEADER, _HEADER_OPTIONAL)
    if header["attn_trace"] != TRACE_VERSION:
        line.refuse(f"attn_trace={header['attn_trace']!r}", f"{TRACE_VERSION}")
    try:
        shape = {name: header[name] for name in ("num_heads", "num_kv_heads", "head_size")}
        return {
            "heads": Heads(**shape),
            "dtype": parse_dtype(header["dtype"]),
            "kv_cache_dtype": parse_kv_cache_dtype(header.get("kv_cache_dtype", "auto")),
            "block_size": header.get("block_size", 16),
        }
    except AttnError as error:
        line.refuse(f"not a layer: {error.message}", "a layer's shape", error)


def _read_step(header: dict[str, Any], line: _Line) -> Workload:
    step = line.parse(_STEP, _STEP_OPTIONAL)
    try:
        return Workload(
            phase=WorkloadPhase.TRACE,
            query_lens=tuple(step["query_lens"]),
            seq_lens=tuple(step["seq_lens"]),
            shared_prefix_len=step.get("shared_prefix_len", 0),
            label=step.get("label") or f"{line.path.stem}:{line.number}",
            **header,
        )
    except AttnError as error:
        line.refuse(f"not a batch: {error.message}", "lengths of a batch", error)


def _check_labels(steps: tuple[Workload, ...], lines: list[_Line]) -> None:
    """Refuse a label that two steps have: it is what tells their results apart."""
    seen: set[str] = set()
    for step, line in zip(steps, lines, strict=True):
        if step.label in seen:
            line.refuse(f"label={step.label!r}, of an earlier line", "a label of its own")
        seen.add(step.label)


def write_trace(path: Path, workloads: tuple[Workload, ...]) -> None:
    """Write steps of one layer shape as a trace.

    Raises:
        InvalidInputError: there are none, they differ in shape, or a trace does not say it.
    """
    if any(w.window is not None or w.returns_lse or w.own_output for w in workloads):
        raise InvalidInputError.for_argument(
            "workloads", "with a window, an LSE or an output of their own", "without, in a trace"
        )
    shapes = {(w.heads, w.dtype, w.kv_cache_dtype, w.block_size) for w in workloads}
    if len(shapes) != 1:
        raise InvalidInputError.for_argument(
            "workloads", f"of {len(shapes)} shapes", "at least one step, all of one layer shape"
        )
    first = workloads[0]
    header = {
        "attn_trace": TRACE_VERSION,
        "num_heads": first.heads.num_heads,
        "num_kv_heads": first.heads.num_kv_heads,
        "head_size": first.heads.head_size,
        "dtype": dtype_name(first.dtype),
        "kv_cache_dtype": first.kv_cache_dtype,
        "block_size": first.block_size,
    }
    lines = [json.dumps(record) for record in (header, *map(_step_record, workloads))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _step_record(workload: Workload) -> dict[str, Any]:
    return {
        "query_lens": list(workload.query_lens),
        "seq_lens": list(workload.seq_lens),
        "label": workload.base_shape,
        "shared_prefix_len": workload.shared_prefix_len,
    }
