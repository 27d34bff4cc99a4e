"""One's own workloads in a file.

A trace is a text file of JSON lines. The first line is a header with the layer's shape:

    {"attn_trace": 1, "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}

Each further line is one step:

    {"query_lens": [1, 1, 512], "seq_lens": [900, 4000, 512], "label": "noon"}

Optional in the header: kv_cache_dtype, block_size. Optional in a step: label, shared_prefix_len.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attn_bench.workloads import Heads, Workload, WorkloadPhase
from attn_shared.dtypes import parse_dtype
from attn_shared.errors import InvalidInputError

__all__ = ["TRACE_VERSION", "read_trace", "write_trace"]

TRACE_VERSION = 1

_HEADER = {"attn_trace", "num_heads", "num_kv_heads", "head_size", "dtype"}
_HEADER_OPTIONAL = {"kv_cache_dtype", "block_size"}
_STEP = {"query_lens", "seq_lens"}
_STEP_OPTIONAL = {"label", "shared_prefix_len"}


def read_trace(path: Path) -> tuple[Workload, ...]:
    """Return the steps of a trace.

    Raises:
        InvalidInputError: a line is not what the format says; names file, line and value.
    """
    lines = [
        (number, line)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if line.strip()
    ]
    if len(lines) < 2:
        raise _bad(path, len(lines), "no steps", "a header line and at least one step")
    header = _parse(path, *lines[0], _HEADER, _HEADER_OPTIONAL)
    if header["attn_trace"] != TRACE_VERSION:
        raise _bad(path, 1, f"attn_trace={header['attn_trace']!r}", str(TRACE_VERSION))
    return tuple(_step(path, header, *line) for line in lines[1:])


def _step(path: Path, header: dict[str, Any], number: int, line: str) -> Workload:
    step = _parse(path, number, line, _STEP, _STEP_OPTIONAL)
    return Workload(
        phase=WorkloadPhase.TRACE,
        query_lens=_lengths(path, number, "query_lens", step),
        seq_lens=_lengths(path, number, "seq_lens", step),
        heads=Heads(
            num_heads=header["num_heads"],
            num_kv_heads=header["num_kv_heads"],
            head_size=header["head_size"],
        ),
        dtype=parse_dtype(header["dtype"]),
        kv_cache_dtype=header.get("kv_cache_dtype", "auto"),
        block_size=header.get("block_size", 16),
        shared_prefix_len=step.get("shared_prefix_len", 0),
        label=step.get("label", f"line {number}"),
    )


def _lengths(path: Path, number: int, name: str, step: dict[str, Any]) -> tuple[int, ...]:
    values = step[name]
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise _bad(path, number, f"{name}={values!r}", "a list of integers")
    return tuple(values)


def _parse(
    path: Path, number: int, line: str, needed: set[str], optional: set[str]
) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _bad(path, number, f"not JSON ({error.msg})", "one JSON object per line") from error
    if not isinstance(record, dict):
        raise _bad(path, number, repr(record), "a JSON object")
    missing, unknown = needed - record.keys(), record.keys() - needed - optional
    if missing or unknown:
        raise _bad(
            path,
            number,
            f"missing {sorted(missing)}, unknown {sorted(unknown)}",
            f"the keys {sorted(needed)}, and optionally {sorted(optional)}",
        )
    return record


def _bad(path: Path, number: int, value: str, allowed: str) -> InvalidInputError:
    return InvalidInputError.for_argument(f"{path}, line {number}", value, allowed)


def write_trace(path: Path, workloads: tuple[Workload, ...]) -> None:
    """Write steps of one layer shape as a trace.

    Raises:
        InvalidInputError: there are none, or they differ in shape.
    """
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
        "dtype": str(first.dtype).removeprefix("torch."),
        "kv_cache_dtype": first.kv_cache_dtype,
        "block_size": first.block_size,
    }
    steps = [
        {
            "query_lens": list(w.query_lens),
            "seq_lens": list(w.seq_lens),
            "label": w.label,
            "shared_prefix_len": w.shared_prefix_len,
        }
        for w in workloads
    ]
    lines = [json.dumps(record) for record in (header, *steps)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
