"""`attn demo`: a small language model on the backend chosen for this machine."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from attn_cli.completion import complete_backend
from attn_cli.installing import missing_package
from attn_cli.options import Panel
from attn_cli.output import OutputFlags, console, write_file
from attn_shared.errors import InvalidInputError

__all__ = ["DemoFlags", "demo"]

_panel = Panel()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFlags:
    """What the model is asked, and how it runs."""

    prompt: Annotated[str, _panel.word("--prompt", "What the model is asked.", "TEXT")] = (
        "Explain in one paragraph what attention means in a language model."
    )
    max_new_tokens: Annotated[int, _panel.integer("--max-new-tokens", "Tokens to generate.")] = 64
    backend: Annotated[
        str | None,
        _panel.word(
            "--backend", "The backend to use, or auto.", "NAME", autocompletion=complete_backend
        ),
    ] = None
    device: Annotated[str, _panel.word("--device", "A torch device of this machine.", "NAME")] = (
        "cpu"
    )
    dtype: Annotated[str, _panel.word("--dtype", "float32, bfloat16 or float16.", "DTYPE")] = (
        "float32"
    )


def demo(flags: DemoFlags, output: OutputFlags) -> int:
    """Run a small language model on the chosen backend and compare it with stock torch."""
    if output.output is not None and not output.as_json:
        raise InvalidInputError.for_argument(
            "--output", f"{output.output!r} without --json", "--output FILE with --json"
        )
    try:
        import attn_transformers.demo as runner
    except ModuleNotFoundError as error:
        raise missing_package("demo", error) from error
    gc.enable()  # off for short commands; this one runs long and makes garbage
    run = partial(
        runner.main,
        prompt=flags.prompt,
        max_new_tokens=flags.max_new_tokens,
        backend=flags.backend,
        device=flags.device,
        dtype=flags.dtype,
        as_json=output.as_json,
        quiet=output.quiet,
        console=console(stderr=output.as_json),
    )
    return run() if output.output is None else _with_copy(run, output)


def _with_copy(run: Callable[[], int], output: OutputFlags) -> int:
    """Run the demo, which prints its JSON itself, and write that to the file too."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run()
    write_file(Path(str(output.output)), printed.getvalue())
    sys.stdout.write(printed.getvalue())
    return code
