from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest
import typer

import attn_cli
from attn_cli.main import app, main, run


@app.command("fail", hidden=True)
def fail(kind: str) -> None:
    raise {
        "interrupt": KeyboardInterrupt,
        "abort": typer.Abort,
        "pipe": BrokenPipeError,
        "bug": ZeroDivisionError,
    }[kind]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attn {attn_cli.__version__}\n"


def test_help_lists_the_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for command in ("info", "list", "select", "explain", "demo"):
        assert f"│ {command} " in text
    assert "3 no backend fits" in text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["selekt"], "selekt"),
        (["select", "--head-sise", "8"], "--head-sise"),
        (["select", "--head-size", "8"], "--num-heads"),
        (["select", "--num-heads", "eight"], "'eight' is not an integer"),
        (["select", "--num-heads"], "--num-heads"),
        (["list", "extra"], "extra"),
    ],
)
def test_words_that_are_not_understood(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert complaint in printed.err


def test_a_usage_error_is_json_where_json_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["select", "--num-heads", "eight", "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert record["schema_version"] == 1
    assert record["error"]["exit_code"] == 2
    assert "'eight' is not an integer" in record["error"]["message"]


@pytest.mark.parametrize("kind", ["interrupt", "abort"])
def test_an_interruption_is_one_word(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail", kind]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_bug_shows_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        main(["fail", "bug"])


def test_the_process_ends_with_the_commands_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["attn", "--version"])
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 0


@pytest.mark.parametrize("is_ours", [True, False], ids=["attn", "torch-alone"])
def test_a_command_says_nothing_of_numpy_where_there_is_none(is_ours: bool) -> None:
    words = ["attn", "list", "-q"]
    code = f"import sys; sys.modules['numpy'] = None; sys.argv = {words}; "
    code += "from attn_cli.main import run; run()" if is_ours else "import torch; torch.zeros(1)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert ("Failed to initialize NumPy" in done.stderr) is not is_ours
    assert done.stderr == "" or not is_ours
