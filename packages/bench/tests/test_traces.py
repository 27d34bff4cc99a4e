from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attn_bench_testing import workload

from attn_bench.traces import read_trace, write_trace
from attn_bench.workloads import WorkloadPhase
from attn_shared.errors import InvalidInputError

HEADER = {
    "attn_trace": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": "bfloat16",
}
STEP = {"query_lens": [1, 3], "seq_lens": [9, 3]}


def write(path: Path, *lines: object) -> Path:
    """Write objects as JSON, and strings as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "day.jsonl"


def test_a_trace_by_hand(path: Path) -> None:
    header = HEADER | {"block_size": None, "kv_cache_dtype": "fp8"}
    step = STEP | {"label": "noon"}
    shared = {"query_lens": [1, 1], "seq_lens": [9, 8], "shared_prefix_len": 6}
    noon, night = read_trace(write(path, header, "", step, shared))
    assert (noon.query_lens, noon.seq_lens, noon.label) == ((1, 3), (9, 3), "noon")
    assert noon.phase is WorkloadPhase.TRACE
    assert (noon.dtype, noon.block_size, noon.kv_cache_dtype) == (torch.bfloat16, None, "fp8")
    assert str(noon.heads) == "4/2x8"
    assert (night.label, night.shared_prefix_len) == ("day:4", 6)


def test_what_is_written_is_read(path: Path) -> None:
    steps = (
        workload(phase=WorkloadPhase.TRACE, label="a"),
        workload((1, 1), (9, 8), phase=WorkloadPhase.TRACE, label="b", shared_prefix_len=6),
    )
    write_trace(path, steps)
    assert read_trace(path) == steps


def test_only_steps_of_one_layer_are_written(path: Path) -> None:
    with pytest.raises(InvalidInputError, match="of 2 shapes"):
        write_trace(path, (workload(), workload(dtype=torch.bfloat16)))
    with pytest.raises(InvalidInputError, match="of 0 shapes"):
        write_trace(path, ())


@pytest.mark.parametrize(
    ("lines", "number", "complaint"),
    [
        (("{", STEP), 1, "not JSON"),
        (([1], STEP), 1, "a JSON object"),
        ((HEADER | {"attn_trace": 2}, STEP), 1, "attn_trace=2; allowed: 1"),
        ((HEADER | {"attn_trace": True}, STEP), 1, "attn_trace=True"),
        ((HEADER | {"dtype": "float8"}, STEP), 1, "unknown dtype 'float8'"),
        ((HEADER | {"num_heads": "4"}, STEP), 1, "num_heads='4'; allowed: an integer"),
        ((HEADER | {"num_heads": 3}, STEP), 1, "not a layer"),
        ((HEADER | {"block_size": 1.5}, STEP), 1, "block_size=1.5; allowed: an integer or null"),
        ((HEADER | {"kv_cache_dtype": "fp9"}, STEP), 1, "unknown kv_cache_dtype 'fp9'"),
        ((HEADER | {"head": 3}, STEP), 1, r"unknown \['head'\]"),
        ((HEADER, STEP, {"query_lens": [1]}), 3, r"missing \['seq_lens'\]"),
        ((HEADER, STEP | {"lable": "x"}), 2, r"unknown \['lable'\]"),
        ((HEADER, STEP | {"seq_lens": "9"}), 2, "seq_lens='9'; allowed: a list of integers"),
        ((HEADER, STEP | {"seq_lens": [9, 3.5]}), 2, "a list of integers"),
        ((HEADER, STEP | {"seq_lens": [9, True]}), 2, "a list of integers"),
        ((HEADER, STEP | {"seq_lens": [9, 2]}), 2, "not a batch.*1 to seq_len=2"),
        ((HEADER, STEP | {"query_lens": []}), 2, "not a batch"),
        ((HEADER, STEP | {"label": 3}), 2, "label=3; allowed: a string"),
        ((HEADER, STEP | {"shared_prefix_len": 1}), 2, "shared_prefix_len"),
        ((HEADER, STEP | {"label": "x"}, STEP | {"label": "x"}), 3, "a label of its own"),
    ],
)
def test_each_malformed_line_is_named(
    path: Path, lines: tuple[object, ...], number: int, complaint: str
) -> None:
    with pytest.raises(InvalidInputError, match=rf"day\.jsonl, line {number} is .*{complaint}"):
        read_trace(write(path, *lines))


def test_a_trace_without_steps_is_refused(path: Path) -> None:
    with pytest.raises(InvalidInputError, match="1 lines; allowed: a header line and at least"):
        read_trace(write(path, HEADER))


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"trace is .*day\.jsonl.*No such file"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="a text file"):
        read_trace(path)


@pytest.mark.parametrize("field", ["window", "returns_lse", "own_output"])
def test_what_a_trace_cannot_say_is_not_written(field: str, tmp_path: Path) -> None:
    asked = workload(**{field: 3 if field == "window" else True})
    with pytest.raises(InvalidInputError, match="with a window, an LSE or an output"):
        write_trace(tmp_path / "t.jsonl", (asked,))
