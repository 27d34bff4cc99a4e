from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attn_shared.device import PRESETS
from attn_shared.registry import DEFAULT_REGISTRY

BRIEF = ("--backend", "TORCH_SDPA", "--device", "h200")


def test_json_holds_what_was_asked_for(attn: Any) -> None:
    words = ("matrix", *BRIEF, "--device", "mi300x")
    record = attn.json(*words)
    assert record["schema_version"] == 1
    assert [backend["name"] for backend in record["backends"]] == ["TORCH_SDPA"]
    assert [device["name"] for device in record["devices"]] == ["h200", "mi300x"]
    assert record == json.loads(
        attn("matrix", *BRIEF, "--device", "mi300x", "--format", "json").stdout
    )


def test_every_backend_and_preset_by_default(attn: Any, paged16: str) -> None:
    record = attn.json("matrix")
    assert [backend["name"] for backend in record["backends"]] == list(DEFAULT_REGISTRY.names())
    assert [device["name"] for device in record["devices"]] == list(PRESETS)
    own = next(backend for backend in record["backends"] if backend["name"] == paged16)
    answers = {column["place"]: column["answer"] for column in own["columns"]}
    assert answers == {"NVIDIA; CPU": "yes", "AMD; Intel": "no"}


def test_an_architecture_and_a_device_of_this_machine(attn: Any) -> None:
    done = attn("matrix", "--backend", "TORCH_SDPA", "--device", "sm_90a", "--device", "cpu", "-q")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines] == [
        ["TORCH_SDPA", "sm_90a", "yes"],
        ["TORCH_SDPA", "cpu", "yes"],
    ]
    assert {line[3] for line in lines} <= {"run", "not-run"}


def test_the_table_is_printed_by_default(attn: Any) -> None:
    text = attn("matrix", *BRIEF).stdout
    assert "NVIDIA h200" in text
    assert "two-sided window ┐" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("form", "beginning"), [("markdown", "# Support matrix\n"), ("html", "<!DOCTYPE html>\n")]
)
def test_pages_go_to_stdout_or_into_a_file(
    attn: Any, tmp_path: Path, form: str, beginning: str
) -> None:
    printed = attn("matrix", *BRIEF, "--format", form)
    assert printed.stdout.startswith(beginning)
    path = tmp_path / "page"
    written = attn("matrix", *BRIEF, "--format", form, "--output", str(path))
    assert (written.stdout, written.stderr) == ("", f"wrote {path}\n")
    assert path.read_text(encoding="utf-8") == printed.stdout
    quiet = attn("matrix", *BRIEF, "--format", form, "--output", str(path), "-q")
    assert (quiet.stdout, quiet.stderr) == ("", "")


def test_a_file_holds_the_json_beside_the_table(attn: Any, tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    done = attn("matrix", *BRIEF, "--output", str(path))
    assert "NVIDIA h200" in done.stdout
    assert json.loads(path.read_text()) == attn.json("matrix", *BRIEF)


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["--format", "xml"], 2, "unknown format 'xml'; allowed: html, json, markdown, table"),
        (["--format", "html", "--json"], 2, "--format is html; allowed: json with --json"),
        (["--backend", "NOPE"], 2, "unknown backend 'NOPE'"),
        (["--backend", "FLASHMLA_SPARSE"], 3, "not provided by any installed distribution"),
        (["--device", "h2oo"], 2, "unknown device 'h2oo'"),
    ],
)
def test_what_is_not_understood(attn: Any, words: list[str], code: int, complaint: str) -> None:
    done = attn("matrix", *words)
    assert done.exit_code == code
    assert complaint in " ".join((done.stdout + done.stderr).split())


def test_a_name_that_is_repeated_is_asked_once(attn: Any) -> None:
    record = attn.json("matrix", *BRIEF, *BRIEF)
    assert (len(record["backends"]), len(record["devices"])) == (1, 1)


def test_a_capability_that_raises_is_one_backends_affair(
    attn: Any, paged16: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DEFAULT_REGISTRY.load(paged16), "capability", lambda *_: 1 // 0)
    done = attn("matrix", "--device", "h200", "-q")
    assert done.exit_code == 0
    assert f"{paged16} h200 unavailable not-run" in done.stdout.splitlines()
    shown = attn("matrix", "--device", "h200", "--backend", paged16).stdout
    assert "ZeroDivisionError" in shown
