from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attn_bench_testing import CELL, RESULTS, workload

from attn_bench.results import (
    Limits,
    Rate,
    Results,
    Settings,
    Skipped,
    SkippedStatus,
    read_results,
    shape_fields,
    write_results,
)
from attn_shared.errors import InvalidInputError

REQUIRED_KEYS = {
    "backend", "peer", "phase", "batch", "context", "query_len", "num_heads", "num_kv_heads",
    "head_size", "dtype", "kv_cache_dtype", "block_size", "time_us", "interval_us", "peer_time_us",
    "ratio", "gb_per_s", "tflop_per_s", "host_us",
}  # fmt: skip


def skipped(backend: str = "TORCH_SDPA", peer: str | None = None, **fields: Any) -> Skipped:
    shape = shape_fields(workload()) | {"status": SkippedStatus.REFUSED, "reason": "no"}
    return Skipped(backend=backend, peer=peer, exit_code=3, **(shape | fields))


def test_the_form(tmp_path: Path) -> None:
    write_results(RESULTS, tmp_path / "a.json")
    record = json.loads((tmp_path / "a.json").read_text())
    assert next(iter(record)) == "schema_version"
    assert record.keys() >= {"schema_version", "date", "machine", "versions", "limits", "cells"}
    assert record["schema_version"] == 1
    (cell,) = record["cells"]
    assert cell.keys() >= REQUIRED_KEYS
    assert cell["interval_us"] == [1200.0, 1300.0]
    assert cell["host_us"] is None
    assert record["limits"]["matmul_tflop_per_s"]["bfloat16"]["median"] == 1.6


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    results = replace(RESULTS, skipped=(skipped(),))
    write_results(results, path)
    assert read_results(path) == results
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "a JSON file that can be read"),
        pytest.param("[" * 100_000, "a JSON file that can be read", id="nested too deep"),
        pytest.param("9" * 5000, "a JSON file that can be read", id="a number of 5000 digits"),
        ("[]", "no JSON object"),
        ('{"schema_version": 2}', "schema_version is 2; allowed: 1"),
        ("{}", "schema_version is None"),
        ('{"schema_version": 1}', "results.date is missing"),
    ],
)
def test_what_is_not_of_the_form_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=f"a.json.*{complaint}"):
        read_results(path)


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    record = RESULTS.to_dict()
    record["cells"][0]["time_us"] = "fast"
    path = tmp_path / "a.json"
    path.write_text(json.dumps(record))
    with pytest.raises(InvalidInputError, match=r"results.cells\[0\].time_us is 'fast'"):
        read_results(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="No such file"):
        read_results(tmp_path / "a.json")


def test_a_full_disk_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_results(RESULTS, path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("attn_bench.results.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_results(replace(RESULTS, cells=()), path)
    assert read_results(path) == RESULTS
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_cell_measured_again_replaces_the_older() -> None:
    other = replace(CELL, peer="torch.sdpa_gathered")
    again = replace(CELL, time_us=1.0)
    both = RESULTS.with_group((other,), ())
    assert both.cells == (CELL, other)
    assert both.with_group((again,), ()).cells == (other, again)


def test_a_cell_replaces_what_was_skipped() -> None:
    first = RESULTS.with_group((), (skipped(), skipped("OTHER")))
    shape = shape_fields(workload())
    measured = replace(CELL, **shape)
    assert first.with_group((measured,), ()).skipped == (skipped("OTHER"),)


def test_limits_are_medians_over_the_groups_of_all_runs() -> None:
    first = Limits().with_rounds("float32", [1.0, 9.0, 2.0], [0.1])
    both = first.with_rounds("bfloat16", [4.0], [0.5, 0.7, 0.6]).with_rounds(
        "float32", [9.0], [0.3]
    )
    assert both.read_gb_per_s == Rate.of((2.0, 4.0, 9.0))
    assert both.read_gb_per_s.median == 4.0
    assert both.matmul_tflop_per_s == {"float32": Rate.of((0.1, 0.3)), "bfloat16": Rate.of((0.6,))}


@pytest.mark.parametrize(
    ("change", "complaint"), [({"rounds": 0}, "rounds is 0"), ({"cache_state": "hot"}, "cold or")]
)
def test_settings_that_measure_nothing(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        Settings(**change)


def test_numbers_that_are_none_are_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Results.to_json(replace(RESULTS, cells=(replace(CELL, time_us=float("nan")),)))
