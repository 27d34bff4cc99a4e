"""The pages of docs/benchmarks say what their files of results say; all files have one form."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from attn_bench.results import read_results

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path for path in (ROOT / "docs" / "benchmarks").glob("*.json") if path.stem != "selection"
)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    return importlib.import_module("generate_benchmarks")


@pytest.fixture
def folder(generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of docs/benchmarks that a test may spoil."""
    copy = tmp_path / "benchmarks"
    shutil.copytree(ROOT / "docs" / "benchmarks", copy)
    monkeypatch.setattr(generator, "FOLDER", copy)
    return copy


def test_the_pages_are_current(generator: ModuleType) -> None:
    assert list(generator.stale()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_of_the_one_form(path: Path) -> None:
    results = read_results(path)
    assert results.cells
    assert results.limits.read_gb_per_s is not None
    assert {cell.dtype for cell in results.cells} == results.limits.matmul_tflop_per_s.keys()


def test_another_figure_makes_a_page_stale(generator: ModuleType, folder: Path) -> None:
    path = folder / FILES[0].name
    record = json.loads(path.read_text())
    record["cells"][0]["time_us"] *= 2
    path.write_text(json.dumps(record))
    (problem,) = generator.stale()
    assert f"docs/benchmarks/{path.stem}.md is not current; run: python ci/" in problem
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0


def test_the_hosts_work_stands_beside_the_peers(generator: ModuleType, folder: Path) -> None:
    path = folder / "cpu-torch.json"
    record = json.loads(path.read_text())
    label = record["cells"][0]["label"]
    for cell in record["cells"]:
        if cell["label"] == label:
            cell |= {"host_us": 12.0, "peer_host_us": 87.0, "plan_host_us": 40.0}
            cell |= {"plan_waits": False, "peer_plan_host_us": 25.0}
    path.write_text(json.dumps(record))
    text = generator.page("cpu-torch", read_results(path))
    table = text.split("The host's work, outside graphs:")[1].split("\n\n")[1]
    heads, _, row = table.splitlines()[:3]
    assert heads.startswith("| Workload | A call | `torch.sdpa_gathered` |")
    assert "| `build` | It waits |" in heads
    assert label in row
    assert "| 12.0 us | 87.0 us | 87.0 us | 40.0 us | no | 25.0 us | 25.0 us |" in row


def test_what_was_not_measured_of_the_host_is_left_out(generator: ModuleType) -> None:
    assert "The host's work" not in generator.pages()["h200-torch.md"]


def test_a_new_file_is_listed_and_needs_its_plots(generator: ModuleType, folder: Path) -> None:
    shutil.copy(folder / FILES[0].name, folder / "new.json")
    assert generator.main([]) == 0
    assert "[new](new.md)" in (folder / "index.md").read_text()
    missing = list(generator.stale())
    assert [problem.split()[0] for problem in missing] == [
        "docs/benchmarks/new.svg",
        "docs/benchmarks/new.png",
    ]
    assert all("is missing" in problem for problem in missing)


def test_the_index_keeps_its_own_words(generator: ModuleType, folder: Path) -> None:
    before = (folder / "index.md").read_text()
    assert generator.main([]) == 0
    assert (folder / "index.md").read_text() == before
    assert "## How to read them" in before
