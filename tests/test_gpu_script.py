"""The script that proves a platform on a GPU machine without a network."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).resolve().parents[1] / "ci"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("gpu")


@pytest.fixture
def packed(tmp_path: Path, gpu: ModuleType) -> Path:
    wheels = tmp_path / "dist"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing/__init__.py", "NAME = 'thing'\n")
        wheel.writestr("thing-1.0.dist-info/METADATA", "Name: thing\nVersion: 1.0\n")
    source = tmp_path / "tool.py"
    source.write_text("NAME = 'tool'\n")
    with tarfile.open(tmp_path / "tools.tar.xz", "w:xz") as archive:
        archive.add(source, "tool.py")
    into = tmp_path / "pack"
    gpu.pack(into, wheels, [tmp_path / "tools.tar.xz"])
    return into


def test_pack_takes_wheels_and_archives(packed: Path) -> None:
    names = sorted(path.name for path in packed.iterdir())
    assert names == ["thing-1.0-py3-none-any.whl", "tools.tar.xz"]


def test_pack_says_what_is_missing(tmp_path: Path, gpu: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"holds no wheel; run: python ci/start\.py dist"):
        gpu.pack(tmp_path / "pack", tmp_path, [])


def test_unpack_lays_packages_and_metadata_into_one_folder(
    packed: Path, tmp_path: Path, gpu: ModuleType
) -> None:
    site = tmp_path / "site"
    assert gpu.unpack(packed, site) == ["thing-1.0-py3-none-any.whl", "tools.tar.xz"]
    assert (site / "thing/__init__.py").is_file()
    assert (site / "thing-1.0.dist-info/METADATA").is_file()
    assert (site / "tool.py").is_file()


def test_every_step_is_tried_and_its_output_kept(tmp_path: Path, gpu: ModuleType) -> None:
    def step(name: str, code: str, limit_s: float = 60.0, absent: str = "") -> object:
        command = (sys.executable, "-c", code)
        return gpu.Step(name=name, command=command, limit_s=limit_s, absent=absent)

    planned = [
        step("good", "print('done')"),
        step("bad one", "import sys; print('words'); sys.exit(3)"),
        step("slow", "import time; time.sleep(60)", limit_s=0.5),
        step("other machine", "", absent="no such tool"),
    ]
    results = gpu.run_steps(iter(planned), tmp_path, {})
    assert [result.status for result in results] == ["passed", "failed", "out of time", "not run"]
    assert results[1].reason == "exit code 3"
    assert results[1].tail == ["words"]
    assert (tmp_path / "bad-one.log").read_text() == "words\n"
    record = json.loads((tmp_path / "summary.json").read_text())
    assert [each["name"] for each in record["steps"]] == [
        "good",
        "bad one",
        "slow",
        "other machine",
    ]
    assert record["steps"][3]["reason"] == "no such tool"


def test_what_is_planned_for_a_backend(tmp_path: Path, gpu: ModuleType) -> None:
    words = ["run", "--pack", "p", "--out", "o", "--backend", "TORCH_SDPA", "--peer", "torch.sdpa"]
    options = gpu.parser().parse_args([*words, "--workload", "decode"])
    planned = {step.name: " ".join(step.command) for step in gpu.steps(options, tmp_path)}
    assert list(planned) == [
        "info",
        "session cuda",
        "verify TORCH_SDPA",
        "bench TORCH_SDPA",
        "memory check TORCH_SDPA",
    ]
    assert "--no-venv -s cuda -- --require-hardware" in planned["session cuda"]
    assert "verify TORCH_SDPA --device cuda:0 --depth quick" in planned["verify TORCH_SDPA"]
    assert "--peer torch.sdpa --workload decode" in planned["bench TORCH_SDPA"]
