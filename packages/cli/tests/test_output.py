from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from rich.text import Text

from attn_cli.output import OutputFlags, console, emit, show, warn, write_file
from attn_shared.errors import InvalidInputError

RECORD = {"answer": 42, "why": "naïve"}


def give(output: OutputFlags) -> None:
    emit(RECORD, output, tables=lambda: [Text("a table")], bare=["42"])


@pytest.mark.parametrize(
    ("output", "printed"),
    [(OutputFlags(), "a table\n"), (OutputFlags(quiet=True), "42\n")],
)
def test_a_person_gets_a_table_or_the_bare_answer(
    output: OutputFlags, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    give(output)
    assert capsys.readouterr() == (printed, "")


def test_json_is_the_same_with_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    give(OutputFlags(as_json=True, quiet=True))
    printed = capsys.readouterr()
    assert (json.loads(printed.out), printed.err) == (RECORD, "")


def test_json_does_not_make_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> list[Text]:
        raise AssertionError

    emit(RECORD, OutputFlags(as_json=True), tables=fail, bare=[])
    assert json.loads(capsys.readouterr().out) == RECORD


def test_a_file_holds_the_json_beside_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answer.json"
    path.write_text("old")
    give(OutputFlags(output=str(path)))
    assert capsys.readouterr().out == "a table\n"
    assert json.loads(path.read_text()) == RECORD
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answer.json"
    path.write_text("old")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["no/such/folder.json", "."])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"--output is .*; allowed: a file"):
        write_file(tmp_path / name, "text")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_file(path, "text")
    assert os.read(reader, 10) == b"text"
    assert stat.S_ISFIFO(path.stat().st_mode)
    os.close(reader)


def test_warnings_go_to_stderr_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    warn(["beware"], OutputFlags(as_json=True))
    warn(["beware"], OutputFlags(quiet=True))
    assert capsys.readouterr() == ("", "beware\n")


def test_words_in_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("pip install 'attn-cuda[fa3]' :warning:")
    assert capsys.readouterr().out == "pip install 'attn-cuda[fa3]' :warning:\n"


def test_a_reader_that_went_away_is_told_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError):
            show([Text("x" * 100_000)])
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
