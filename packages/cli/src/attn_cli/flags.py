"""Commands whose options are the fields of dataclasses, so that several share one set of flags."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from attn_cli.failures import guarded
from attn_cli.output import OutputFlags

__all__ = ["command"]


def command(run: Callable[..., int]) -> Callable[..., None]:
    """Return a typer command for a function that takes dataclasses of flags.

    Every parameter of `run` is annotated with a dataclass whose fields are
    `Annotated[type, typer.Option(...)]`; its fields become the command's options. One parameter,
    `output`, is an `OutputFlags`. `run` returns the exit code.
    """
    groups = {name: kind for name, kind in get_type_hints(run).items() if name != "return"}

    def call(**values: Any) -> None:
        arguments = {
            name: kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        output: OutputFlags = arguments["output"]
        raise typer.Exit(guarded(lambda: run(**arguments), output))

    parameters = [p for kind in groups.values() for p in _parameters(kind)]
    call.__name__, call.__doc__ = run.__name__, run.__doc__
    # typer reads both: the signature for order and defaults, the annotations for types
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _parameters(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if field.default is dataclasses.MISSING
            else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(kind)
    ]
