from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
import typer

from attn_cli.failures import failure_record, guarded, headline, report_usage_error
from attn_cli.output import OutputFlags
from attn_cli.request_flags import RequestFlags
from attn_shared.device import preset
from attn_shared.errors import AttnError, NoBackendError, UnknownNameError, VendorMissingError
from attn_shared.selector import DEFAULT_SELECTOR


def raises(error: BaseException) -> NoReturn:
    raise error


def no_backend() -> NoBackendError:
    """An error with verdicts: no backend reads a cache of this format."""
    request = RequestFlags(num_heads=4, head_size=64, kv_cache_dtype="nvfp4").to_request()
    with pytest.raises(NoBackendError) as caught:
        DEFAULT_SELECTOR.resolve(request, preset("genericcpu"))
    return caught.value


ERROR = UnknownNameError("unknown thing 'x'; allowed: y.", hint="did you mean 'y'?")


def test_a_commands_exit_code_is_passed_on() -> None:
    assert guarded(lambda: 1, OutputFlags()) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(ERROR, 2), (VendorMissingError("gone."), 4), (NoBackendError("none."), 3)],
)
def test_an_error_carries_its_exit_code(error: AttnError, code: int) -> None:
    assert guarded(lambda: raises(error), OutputFlags()) == code


def test_a_person_reads_message_and_hint_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    guarded(lambda: raises(ERROR), OutputFlags(quiet=True))
    words = "Error: unknown thing 'x'; allowed: y.\nHint: did you mean 'y'?\n"
    assert capsys.readouterr() == ("", words)


def test_a_program_reads_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    guarded(lambda: raises(ERROR), OutputFlags(as_json=True))
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out) == {
        "schema_version": 1,
        "error": {
            "class": "UnknownNameError",
            "message": "unknown thing 'x'; allowed: y.",
            "hint": "did you mean 'y'?",
            "exit_code": 2,
        },
    }


def test_the_file_holds_the_failure(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    guarded(lambda: raises(ERROR), OutputFlags(output=str(path)))
    assert json.loads(path.read_text())["error"]["class"] == "UnknownNameError"


def test_a_file_that_cannot_hold_it_is_a_second_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = guarded(lambda: raises(ERROR), OutputFlags(output=str(tmp_path)))
    assert code == 2
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert "--output" in first
    assert "unknown thing" in second


def test_verdicts_are_in_the_record_and_not_in_the_message() -> None:
    error = no_backend()
    record = failure_record(error, message=headline(error), hint="", code=3)
    message = record["error"]["message"]
    assert message.startswith("no backend serves this request on ")
    assert message.endswith(").")
    assert "\n" not in message
    found = {v["name"]: [r["code"] for r in v["reasons"]] for v in record["verdicts"]}
    assert "kv_cache_dtype" in found["TORCH_SDPA"]
    assert record["request"]["kv_cache_dtype"] == "nvfp4"


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 // 0, OutputFlags())
    assert capsys.readouterr().out == ""


def test_a_bug_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 // 0, OutputFlags(as_json=True))
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["class"], error["exit_code"]) == ("ZeroDivisionError", 1)
    assert "bug" in error["hint"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort(), typer.Exit(0)])
def test_the_end_of_the_process_is_nobodys_error(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)):
        guarded(lambda: raises(error), OutputFlags(as_json=True))
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_went_away_has_the_shells_code() -> None:
    assert guarded(lambda: raises(BrokenPipeError()), OutputFlags()) == 128 + 13


def test_a_usage_error_says_what_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_usage_error(typer.BadParameter("no such flag"), as_json=True) == 2
    printed = capsys.readouterr()
    assert "no such flag" in json.loads(printed.out)["error"]["message"]
    assert "no such flag" in printed.err
