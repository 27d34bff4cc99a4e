from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

REFERENCE = "attn_conformance.reference_backend:ReferenceBackend"


@pytest.fixture(autouse=True)
def _needs_the_suite() -> None:
    pytest.importorskip("attn_conformance")


def test_a_backend_that_keeps_the_contract(attn: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = attn("verify", REFERENCE, "--rule", "causal", "--output", str(path))
    assert result.exit_code == 0
    assert "CONFORMANCE_REFERENCE: keeps the contract" in result.stdout
    assert '"ok": true' in path.read_text(encoding="utf-8")


def test_failures_are_exit_code_1_and_named(attn: Any, tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    known.write_text("causal[decode]: wrong, and it passes\n", encoding="utf-8")
    words = ("verify", REFERENCE, "--rule", "causal", "--xfails", str(known))
    record = attn.json(*words, code=1)
    assert record["schema_version"] == 1
    assert record["ok"] is False
    assert record["total"]["failed"] == 1
    result = attn(*words, "--quiet")
    assert result.exit_code == 1
    assert result.stdout.split() == ["causal[decode]"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("NO_SUCH_BACKEND",), "unknown backend 'NO_SUCH_BACKEND'"),
        ((REFERENCE, "--depth", "deep"), "unknown depth 'deep'"),
        ((REFERENCE, "--xfails", "missing.txt"), "missing.txt"),
    ],
)
def test_usage_errors_are_exit_code_2(attn: Any, words: tuple[str, ...], message: str) -> None:
    record = attn.json("verify", *words, code=2)
    assert message in record["error"]["message"]


def test_without_the_suite_the_command_says_how_to_get_it(
    attn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("attn_conformance")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "attn_conformance", None)
    monkeypatch.setitem(sys.modules, "attn_conformance.verify", None)
    record = attn.json("verify", "TORCH_SDPA", code=4)
    assert "attn_conformance" in record["error"]["message"]
    assert (
        "in a checkout of attn, run: pip install ./packages/conformance" in record["error"]["hint"]
    )
