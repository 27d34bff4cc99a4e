from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("attn_bench", reason="attn-bench is not installed")

import attn_bench.limits
import attn_bench.measure
import attn_bench.results
import attn_bench.run
import attn_bench.timing
from attn_bench.results import Results, Settings, SkippedStatus, read_results
from attn_bench.run import Outcome, Plan
from attn_cli.commands import bench as command

HEADER = {
    "attn_trace": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_size": 16,
    "dtype": "float32",
    "block_size": 4,
}
STEPS = [
    {"query_lens": [1, 1], "seq_lens": [9, 5], "label": "two"},
    {"query_lens": [6], "seq_lens": [6], "label": "one"},
]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attn_bench.limits._READ_BYTES, "cpu", 4096)
    monkeypatch.setitem(attn_bench.limits._MATMUL_SIZE, "cpu", 16)
    monkeypatch.setitem(attn_bench.timing._FLUSH_BYTES, "cpu", 4096)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Two tiny steps on TORCH_SDPA beside torch's own call."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, [HEADER, *STEPS])))
    names = ["--backend", "TORCH_SDPA", "--peer", "torch.sdpa", "--trace", str(trace)]
    return ["bench", *names, "--rounds", "3", "--device", "cpu"]


def test_figures_a_file_and_plots(attn: Any, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    plots = [tmp_path / "a.png", tmp_path / "a.svg"]
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for plot in plots:
        words += ["--plot", str(plot)]
    result = attn(*words, "--output", str(path), "--note", "a test")
    assert result.exit_code == 0, result.output
    assert "TORCH_SDPA, 2/1x16, float32" in result.stdout
    assert "trace two" in result.stdout
    results = read_results(path)
    assert [(cell.label, cell.peer) for cell in results.cells] == [
        ("two", "torch.sdpa"),
        ("one", "torch.sdpa"),
    ]
    assert all(cell.rounds == 3 and cell.cache_state == "cold" for cell in results.cells)
    assert "a test" in results.machine.notes
    assert all(plot.stat().st_size > 0 for plot in plots)


def test_json_is_the_form_of_the_file(attn: Any, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    record = attn.json(*words, "--warm", "--output", str(path))
    assert record == json.loads(path.read_text())
    assert Results.from_dict(record).settings == Settings(rounds=3, cache_state="warm")


def test_quiet_prints_bare_lines(attn: Any, words: list[str]) -> None:
    result = attn(*words, "--quiet")
    lines = result.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["TORCH_SDPA", "trace", "two"],
        ["TORCH_SDPA", "trace", "one"],
    ]
    assert result.stderr == ""


def test_resume_measures_what_is_missing(attn: Any, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    whole = attn.json(*words, "--output", str(path))
    part = whole | {"cells": whole["cells"][:1]}
    path.write_text(json.dumps(part))
    again = attn.json(*words, "--output", str(path), "--resume")
    assert again["cells"][0] == whole["cells"][0]
    assert [cell["label"] for cell in again["cells"]] == ["two", "one"]
    result = attn(*words, "--resume")
    assert result.exit_code == 2
    assert "--output FILE" in result.stderr


def test_workloads_are_listed(attn: Any) -> None:
    assert "32x4096" in attn("bench", "--list-workloads").stdout
    record = attn.json("bench", "--list-workloads")
    assert record["workload_sets"]["prefill"][0] == {
        "phase": "prefill",
        "label": "1x512",
        "heads": "32/8x128",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "block_size": 16,
    }
    listed = [tuple(one.values()) for one in record["workload_sets"]["cpu-decode"]]
    assert len(set(listed)) == len(listed)
    assert "9/3x64 float32" in " ".join(attn("bench", "--list-workloads").stdout.split())
    assert "quick" in attn("bench", "--list-workloads", "-q").stdout.split()


@pytest.mark.parametrize(
    ("more", "code", "complaint"),
    [
        (["--backend", "TORCH_SPDA"], 2, "TORCH_SPDA"),
        (["--peer", "torch.spda"], 2, "did you mean 'torch.sdpa'"),
        (["--workload", "decod"], 2, "decod"),
        (["--heads", "32"], 2, "as 32/8x128"),
        (["--rounds", "0"], 2, "rounds is 0"),
        (["--rounds", "x"], 2, "'x' is not an integer"),
        (["--graph"], 2, "device cpu has no graphs"),
        (["--plot", "a.pdf"], 2, ".png or .svg"),
        (["--device", "xpu"], 3, "xpu"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], more: list[str], code: int, complaint: str, capsys: Any
) -> None:
    from attn_cli.main import main

    assert main([*words, *more]) == code
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_an_error_never_takes_the_place_of_results(
    attn: Any, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    attn(*words, "--output", str(path))
    before = path.read_bytes()
    result = attn(*words, "--output", str(path), "--heads", "32")
    assert result.exit_code == 2
    assert path.read_bytes() == before


def test_attn_backend_is_taken_and_said(
    attn: Any, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_BACKEND", "TORCH_SDPA")
    without = [word for word in words if word not in ("--backend", "TORCH_SDPA")]
    result = attn(*without)
    assert result.exit_code == 0, result.output
    assert "note: ATTN_BACKEND=TORCH_SDPA is set" in result.stderr
    assert "TORCH_SDPA, 2/1x16, float32" in result.stdout


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The run replaced by one that ends as a test says."""
    ending = SimpleNamespace(is_interrupted=False, write_error=None, statuses=(), plans=[])

    def run(plan: Plan, *, progress: Any, **options: Any) -> Outcome:
        ending.plans.append(plan)
        progress.begin(2)
        progress.group(0, "first")
        progress.round(1, 3)
        progress.problem("one thing went wrong")
        skipped = [SimpleNamespace(status=status, exit_code=3) for status in ending.statuses]
        results = SimpleNamespace(cells=(), skipped=skipped, to_dict=lambda: {"cells": []})
        return Outcome(
            results=results,  # type: ignore[arg-type]
            is_interrupted=ending.is_interrupted,
            write_error=ending.write_error,
        )

    monkeypatch.setattr(attn_bench.run, "run", run)
    return ending


def test_ctrl_c_says_where_the_cells_are(
    attn: Any, words: list[str], outcome: SimpleNamespace, tmp_path: Path
) -> None:
    outcome.is_interrupted = True
    path = tmp_path / "a.json"
    result = attn(*words, "--json", "--output", str(path))
    assert result.exit_code == 130
    assert f"0 finished cells are kept in {path}; --resume goes on" in result.stderr
    assert json.loads(result.stdout) == {"cells": []}
    assert "shown above" in attn(*words, "--json").stderr


def test_a_full_disk_is_said_and_fails(
    attn: Any, words: list[str], outcome: SimpleNamespace, tmp_path: Path
) -> None:
    outcome.write_error = OSError(28, "No space left on device")
    result = attn(*words, "--json", "--output", str(tmp_path / "a.json"))
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert json.loads(result.stdout) == {"cells": []}


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ((), 0),
        ((SkippedStatus.WRONG,), 1),
        ((SkippedStatus.REFUSED, SkippedStatus.FAILED), 1),
        ((SkippedStatus.REFUSED,), 3),
    ],
)
def test_exit_codes(
    attn: Any,
    words: list[str],
    outcome: SimpleNamespace,
    statuses: tuple[SkippedStatus, ...],
    code: int,
) -> None:
    outcome.statuses = statuses
    assert attn(*words, "--json").exit_code == code


def test_problems_are_told_unless_quiet(
    attn: Any, words: list[str], outcome: SimpleNamespace
) -> None:
    assert "one thing went wrong" in attn(*words, "--json").stderr


def test_a_terminal_gets_a_bar(
    words: list[str], outcome: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from attn_cli.main import main

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"cells": []}
    assert "one thing went wrong" in printed.err


@pytest.mark.parametrize("missing", ["attn_bench", "matplotlib"])
def test_a_package_that_is_missing_comes_with_the_command(
    attn: Any, words: list[str], missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == missing:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    result = attn(*words, "--plot", str(tmp_path / "a.png"))
    assert (result.exit_code, result.stdout) == (4, "")
    assert missing in result.stderr
    command = "pip install matplotlib" if missing == "matplotlib" else "pip install './packages/"
    assert command in result.stderr


def test_the_flags_reach_the_plan(attn: Any, words: list[str], outcome: SimpleNamespace) -> None:
    attn(*words, "--json", "--budget", "90", "--warm", "--note", "x", "--workload", "prefill")
    (plan,) = outcome.plans
    assert plan.seconds == 90.0
    assert plan.settings == Settings(rounds=3, cache_state="warm")
    assert plan.notes == ("x",)
    assert len(plan.workloads) == 3 + 2
    assert command.BenchFlags().cold


def test_peers_are_listed_with_what_they_need(attn: Any) -> None:
    record = attn.json("bench", "--list-peers")
    needs = {peer["name"]: peer["needs"] for peer in record["peers"]}
    assert needs["torch.sdpa"] == "torch"
    assert "flashinfer" in needs
    assert attn("bench", "--list-peers", "--quiet").stdout.split() == list(needs)


def test_a_window_an_lse_and_own_outputs(attn: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    names = ["--backend", "TORCH_SDPA", "--heads", "2/1x16", "--dtype", "float32"]
    more = ["--window", "64", "--lse", "--own-output", "--rounds", "1", "--device", "cpu"]
    result = attn("bench", *names, *more, "--output", str(path), "--budget", "1")
    assert result.exit_code == 0, result.output
    cell = read_results(path).cells[0]
    assert (cell.window, cell.returns_lse, cell.own_output) == (64, True, True)
    assert cell.label == "1x1024 window 64 +LSE own out"
