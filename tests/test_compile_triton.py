"""What is read from compiled kernels, what passes a limit, and when the table is stale."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attn_triton.variants import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
NVIDIA = """
Resource usage:
 Common:
  GLOBAL:0
 Function write_kv:
  REG:39 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:656 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
AMD = """
    .private_segment_fixed_size: {scratch}
    .sgpr_count:     28
    .sgpr_spill_count: 0
    .vgpr_count:     92
    .vgpr_spill_count: {spills}
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    return importlib.import_module("compile_triton")


def compiled(script: ModuleType, **changes: Any) -> Any:
    plain = {"arch": "sm_90", "variant": "decode", "is_main": True, "registers": 40}
    return script.Compiled(**{**plain, **changes})


def test_reads_what_each_vendor_says(script: ModuleType) -> None:
    assert script.nvidia_usage(NVIDIA) == (39, 16)
    assert script.amd_usage(AMD.format(scratch=0, spills=0)) == (92, 0)
    assert script.amd_usage(AMD.format(scratch=0, spills=3)) == (92, 12)
    assert script.amd_usage(AMD.format(scratch=64, spills=3)) == (92, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"shared_bytes": 227 * 1024}, ""),
        ({"shared_bytes": 227 * 1024 + 1}, "H200 has 232448"),
        ({"arch": "gfx942", "shared_bytes": 65 * 1024}, "MI300 has 65536"),
        ({"arch": "gfx950", "shared_bytes": 65 * 1024}, ""),
        ({"spilled_bytes": 8}, "spills 8 bytes"),
        ({"spilled_bytes": 8, "is_main": False}, ""),
        ({"error": "type fp8e4nv not supported", "is_main": False}, "does not compile: type fp8"),
    ],
)
def test_what_passes_a_limit(changes: dict[str, Any], words: str, script: ModuleType) -> None:
    found = list(script.problems([compiled(script, **changes)]))
    assert len(found) == bool(words)
    assert words in "".join(found)


def record_of(*found: Any) -> dict[str, Any]:
    return {"triton": "3.7.1", "compiled": [asdict(item) for item in found]}


def test_other_registers_do_not_make_the_table_stale(script: ModuleType) -> None:
    recorded = record_of(compiled(script), compiled(script, variant="seldom", is_main=False))
    now = [compiled(script, registers=48, shared_bytes=4096)]
    assert not list(script.stale(now, recorded, script.page(recorded)))


def test_other_variants_or_another_page_do(script: ModuleType) -> None:
    recorded = record_of(compiled(script), compiled(script, variant="gone"))
    now = [compiled(script), compiled(script, variant="new")]
    found = list(script.stale(now, recorded, "by hand"))
    assert [line.split(";")[0] for line in found] == [
        "gone for sm_90 is no longer compiled",
        "new for sm_90 is not in the table",
        "triton-compilation.md is not what triton-compilation.json gives",
    ]


def test_the_page_shows_the_record_and_names_every_architecture(script: ModuleType) -> None:
    recorded = json.loads(script.RECORD.read_text(encoding="utf-8"))
    assert script.PAGE.read_text(encoding="utf-8") == script.page(recorded)
    assert set(script.LIMITS) == set(ARCHITECTURES)
    assert {item["arch"] for item in recorded["compiled"]} == set(ARCHITECTURES)


def test_writing_some_architectures_keeps_the_others(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    script.write([compiled(script), compiled(script, arch="gfx942")], "3.7.1")
    script.write([compiled(script, variant="new")], "3.7.1")
    recorded = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    found = [(item["arch"], item["variant"]) for item in recorded["compiled"]]
    assert found == [("sm_90", "new"), ("gfx942", "decode")]
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == script.page(recorded)


def test_a_cell(script: ModuleType) -> None:
    assert script.cell(compiled(script)) == "40 0"
    assert script.cell(compiled(script, shared_bytes=73728)) == "40 72K"
    assert script.cell(compiled(script, spilled_bytes=12)) == "40 0 **+12B**"
    assert script.cell(compiled(script, error="no such type")) == "refused: no such type"
