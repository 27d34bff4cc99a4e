"""`attn demo`: a small language model on the backend chosen for this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from attn_shared.dtypes import parse_dtype
from attn_shared.errors import InvalidInputError, VendorMissingError
from attn_transformers.demo_run import DemoRequest, run_demo
from attn_transformers.demo_view import Console, DemoScreen, to_record

__all__ = ["main"]

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended

_EXTRA_PACKAGES = ("gguf", "platformdirs", "rich")


def main(
    prompt: str,
    max_new_tokens: int,
    backend: str | None,
    device: str,
    dtype: str,
    as_json: bool,
    quiet: bool,
    console: Console,
) -> int:
    """Generate text over a paged cache, and compare its tokens with transformers' own attention.

    Args:
        prompt: what the model is asked.
        max_new_tokens: most tokens to generate.
        backend: name of the backend; "auto" overrides ATTN_BACKEND, None leaves it to it.
        device: a torch device of this machine.
        dtype: of the weights that generate the text; the comparison is always in float32.
        as_json: print one JSON record on stdout instead of tables on the console.
        quiet: print the bare text, and no progress.
        console: a rich.console.Console, where tables and progress go.

    Returns:
        0 if all tokens are equal, 1 if not, 130 if interrupted.

    Raises:
        VendorMissingError: the model's package, or one that reads it, is not installed.
        NoBackendError: the backend cannot run the model on this device.
        InvalidInputError: a device or a length that cannot be.
        UnknownNameError: a dtype or backend of no such name.
    """
    _require_packages()
    request = DemoRequest(
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        backend=backend,
        device=_torch_device(device),
        dtype=parse_dtype(dtype),
    )
    screen = DemoScreen(console, shows_progress=not quiet, shows_tables=not (quiet or as_json))
    try:
        with _quiet_transformers():
            result = run_demo(request, screen)
    except KeyboardInterrupt:
        screen.interrupted()
        return INTERRUPTED
    screen.finished(result)
    if as_json:
        sys.stdout.write(json.dumps(to_record(result), indent=2) + "\n")
    elif quiet:
        sys.stdout.write(result.answer.text + "\n")
    return 0 if result.is_equal else 1


def _require_packages() -> None:
    missing = [name for name in _EXTRA_PACKAGES if find_spec(name) is None]
    if missing:
        raise VendorMissingError(
            f"the demo needs what is not installed: {', '.join(missing)}.",
            library=missing[0],
            hint=f"run: pip install {' '.join(missing)}",
        )


def _torch_device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InvalidInputError.for_argument(
            "device", repr(name), "a torch device such as cpu, cuda:0 or xpu"
        ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Leave the screen to the demo: no progress bars and no advice of transformers."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
