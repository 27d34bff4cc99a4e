"""The command `attn`: its sub-commands, and what becomes of a usage error or an interruption.

Nothing here or in the modules of the commands imports torch or rich before a command runs, so
that `attn --help` and shell completion answer at once.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from attn_cli import __version__
from attn_cli.commands.backends import list_backends
from attn_cli.commands.bench import bench
from attn_cli.commands.demo import demo
from attn_cli.commands.info import info
from attn_cli.commands.matrix import matrix
from attn_cli.commands.select import explain, select
from attn_cli.commands.tune import tune
from attn_cli.commands.verify import verify
from attn_cli.exit_codes import BROKEN_PIPE, INTERRUPTED, USAGE
from attn_cli.failures import CliError, report_usage_error
from attn_cli.flags import command

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="attn",
    help="Which attention backend runs a model on a device, and why.",
    epilog="Exit codes: 0 ok, 1 failures found, 2 usage, 3 no backend fits, "
    "4 a vendor library is missing.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("info")(command(info))
app.command("list")(command(list_backends))
app.command("select")(command(select))
app.command("explain")(command(explain))
app.command("matrix")(command(matrix))
app.command("demo")(command(demo))
app.command("bench")(command(bench))
app.command("tune")(command(tune))
app.command("verify")(command(verify))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"attn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Which attention backend runs a model on a device, and why."""


def run() -> NoReturn:
    """Be the process that the shell started: run the command and exit.

    Importing torch makes some 170,000 objects that live as long as the process. Looking for
    garbage among them, during the import and once more at the end, takes a fifth of the time of a
    short command, and finds none.
    """
    gc.disable()
    # Of torch, wherever it makes its first tensor; no command uses NumPy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    code = main()
    gc.freeze()
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: the words after `attn`; those of this process by default.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(words, prog_name="attn", standalone_mode=False)
        sys.stdout.flush()
    except CliError as error:
        return report_usage_error(error, as_json="--json" in words)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        code = BROKEN_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_stdout()
        sys.stderr.write(f"Error: the answer cannot be written ({error.strerror}).\n")
        code = USAGE
    if code == INTERRUPTED:
        sys.stderr.write("interrupted\n")
    if code == BROKEN_PIPE:
        _discard_stdout()
    return code if isinstance(code, int) else 0


def _discard_stdout() -> None:
    """Keep the interpreter from complaining, while it ends, about what nobody will read."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
