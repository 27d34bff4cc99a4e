"""The script that holds picked backends against the best ones, on made-up figures."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("attn_bench", reason="attn-bench is not installed")

from attn_bench.results import Cell, Machine, Results, Settings
from attn_bench.tuned import tuning_workloads
from attn_bench.workloads import Heads

CI = Path(__file__).parents[1] / "ci"
CPU = torch.device("cpu")


@pytest.fixture
def script() -> Iterator[Any]:
    sys.path.insert(0, str(CI))
    yield importlib.import_module("measure_selection")
    sys.path.remove(str(CI))
    for name in ("measure_selection", "repository"):
        sys.modules.pop(name, None)


def cell(peer: str, ratio: float, phase: str, label: str) -> Cell:
    return Cell(
        backend="TORCH_SDPA",
        peer=peer,
        phase=phase,
        label=label,
        batch=1,
        context=64,
        query_len=1,
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        dtype="bfloat16",
        kv_cache_dtype="auto",
        block_size=16,
        shared_prefix_len=0,
        time_us=1.0,
        interval_us=(1.0, 1.0),
        peer_time_us=1.0,
        peer_interval_us=(1.0, 1.0),
        ratio=ratio,
        ratio_interval=(ratio, ratio),
        gb_per_s=1.0,
        tflop_per_s=1.0,
        share_of_read=0.1,
        share_of_matmul=0.1,
        host_us=None,
        plan_us=1.0,
        cache_state="cold",
        mode="eager",
        peer_mode="eager",
        rounds=3,
    )


def results(*cells: Cell) -> Results:
    machine = Machine(
        name="Some CPU",
        arch="x86_64",
        compute_units=2,
        memory_bytes=None,
        threads=2,
        driver=None,
    )
    return Results(
        date="2026-12-01T00:00:00Z", machine=machine, versions={}, settings=Settings(), cells=cells
    )


def test_the_new_points_are_none_of_the_tuned_ones(script: Any) -> None:
    tuned = tuning_workloads(Heads(), torch.bfloat16, CPU)
    new = script.between(tuned, CPU)
    assert new
    assert not {(w.phase, w.shape) for w in new} & {(w.phase, w.shape) for w in tuned}
    assert {w.heads for w in new} == {Heads()}


def test_each_choice_is_held_against_the_best(script: Any) -> None:
    """FLEX_ATTENTION was twice as fast where it was tuned, and is four times as slow between."""
    tuned = results(cell("FLEX_ATTENTION", 2.0, "decode", "1x64"))
    new = results(cell("FLEX_ATTENTION", 0.25, "decode", "2x96"))
    (point,) = script.judge(tuned, new, CPU)
    assert (point["best"], point["lengths"]) == ("TORCH_SDPA", "2x96")
    assert point["over_best"] == {"FLEX_ATTENTION": 4.0, "TORCH_SDPA": 1.0}
    assert point["measured"] == {"pick": "FLEX_ATTENTION", "over_best": 4.0}
    assert point["v0.25.1"] is None  # its one backend for CPUs did not run


def test_means_are_geometric_and_missing_answers_counted_out(script: Any) -> None:
    def point(measured: float | None) -> dict[str, Any]:
        pick = None if measured is None else {"pick": "X", "over_best": measured}
        return {"measured": pick, "default": {"pick": "Y", "over_best": 1.0}, "v0.25.1": None}

    summary = script._summary([point(4.0), point(1.0), point(None)])
    assert summary["measured"] == {"points": 2, "mean": pytest.approx(2.0), "worst": 4.0}
    assert summary["default"]["mean"] == 1.0
    assert summary["v0.25.1"] == {"points": 0, "mean": None, "worst": None}


def test_a_machines_figures_take_the_place_of_its_older_ones(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    for name, number in (("A", 1), ("B", 2), ("A", 3)):
        script._add(path, {"machine": {"name": name}, "number": number})
    record = json.loads(path.read_text())
    assert record["schema_version"] == 1
    assert [(m["machine"]["name"], m["number"]) for m in record["machines"]] == [("B", 2), ("A", 3)]


def test_a_run_of_two_tiny_points(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import attn_bench.limits
    import attn_bench.timing
    import attn_bench.tuned

    monkeypatch.setitem(attn_bench.limits._READ_BYTES, "cpu", 4096)
    monkeypatch.setitem(attn_bench.limits._MATMUL_SIZE, "cpu", 16)
    monkeypatch.setitem(attn_bench.timing._FLUSH_BYTES, "cpu", 4096)
    monkeypatch.setitem(attn_bench.tuned._DECODES, "cpu", ((1, 9),))
    monkeypatch.setitem(attn_bench.tuned._PREFILLS, "cpu", ((1, 6),))
    monkeypatch.setitem(script._DECODES, "cpu", ((2, 7),))
    monkeypatch.setitem(script._PREFILLS, "cpu", ())
    path = tmp_path / "selection.json"
    words = ["--heads", "2/1x16", "--dtype", "float32", "--rounds", "3", "--output", str(path)]
    words += ["--backend", "TORCH_SDPA", "--backend", "FLEX_ATTENTION"]
    assert script.main(words) == 0
    (machine,) = json.loads(path.read_text())["machines"]
    measured = machine["points"] or machine["skipped"]
    assert measured
    assert "measured: " in capsys.readouterr().out


def test_a_cell_without_a_peer_is_a_point_of_one(script: Any) -> None:
    alone = replace(cell("X", 1.0, "decode", "1x64"), peer=None, ratio=None)
    (point,) = script.judge(results(), results(alone), CPU)
    assert point["over_best"] == {"TORCH_SDPA": 1.0}
    assert point["measured"] is None
