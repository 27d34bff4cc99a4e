"""What becomes of an error: words or JSON for the user, and the exit code that it carries."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from attn_cli.exit_codes import BROKEN_PIPE, FAILURES_FOUND, USAGE
from attn_cli.output import OutputFlags, console, write_file
from attn_cli.schema import SCHEMA_VERSION
from attn_shared.errors import AttnError, InvalidInputError

__all__ = ["CliError", "failure_record", "guarded", "headline", "report_usage_error"]

# Releases of typer stand on the package click or carry a copy of it; in both, this is the base of
# every error of parsing.
CliError: type[Exception] = typer.BadParameter.__mro__[2]


def guarded(call: Callable[[], int], output: OutputFlags) -> int:
    """Run a command; report what it raises in the form that was asked for.

    Returns:
        The command's exit code, or the error's.

    Raises:
        Exception: what is nobody's expected error: a bug, which shows its traceback.
    """
    try:
        return call()
    except AttnError as error:
        _report(error, output)
        return error.exit_code
    except BrokenPipeError:
        return BROKEN_PIPE
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if output.as_json:
            hint = "this is a bug of attn; the traceback is on stderr."
            _print_json(failure_record(error, message=str(error), hint=hint, code=FAILURES_FOUND))
        raise


def report_usage_error(error: Exception, *, as_json: bool) -> int:
    """Report words that the command line does not understand; returns the exit code."""
    message = getattr(error, "format_message", lambda: str(error))()
    if as_json:
        hint = "`attn COMMAND --help` lists the options."
        _print_json(failure_record(error, message=message, hint=hint, code=USAGE))
    show = getattr(error, "show", None)
    if show is not None:
        show()
    return int(getattr(error, "exit_code", USAGE))


def failure_record(error: BaseException, *, message: str, hint: str, code: int) -> dict[str, Any]:
    """Return an error as JSON-safe values, with the verdicts that it holds, if any."""
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "error": {
            "class": type(error).__name__,
            "message": message,
            "hint": hint,
            "exit_code": code,
        },
    }
    selection = getattr(error, "selection", None)
    if selection is not None:
        answer = selection.to_dict()
        kept = ("request", "device", "verdicts", "runner_up", "ahead", "notes")
        record |= {key: answer[key] for key in kept}
    return record


def _report(error: AttnError, output: OutputFlags) -> None:
    """Say what happened: on stderr for a person, on stdout and in the file for a program."""
    message = headline(error)
    record = failure_record(error, message=message, hint=error.hint, code=error.exit_code)
    _keep_copy(record, error, output)
    if output.as_json:
        _print_json(record)
        return
    from rich.text import Text

    screen = console(stderr=True)
    screen.print(Text.assemble(("Error: ", "bold red"), message), soft_wrap=True)
    if error.hint:
        screen.print(Text.assemble(("Hint: ", "bold"), error.hint), soft_wrap=True)


def _keep_copy(record: dict[str, Any], error: AttnError, output: OutputFlags) -> None:
    """Write the record to the file, if one was named; that this fails too is a second message."""
    if output.output is None:
        return
    try:
        write_file(Path(output.output), json.dumps(record, indent=2) + "\n")
    except InvalidInputError as problem:
        if problem.message != error.message:
            sys.stderr.write(f"Error: {problem.message}\n")


def headline(error: AttnError) -> str:
    """Return the message without the table of verdicts, which is shown apart."""
    if getattr(error, "selection", None) is None:
        return error.message
    return f"{error.message.splitlines()[0].rstrip(':.')}."


def _print_json(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
