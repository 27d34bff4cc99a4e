"""Signatures of vendors' calls as data, and calls held against them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = ["VendorSignature", "parse_parameters"]

_Kind = inspect.Parameter


@dataclass(frozen=True, kw_only=True)
class VendorSignature:
    """One call of one release.

    Attributes:
        name: of the function, or "Class.method".
        parameters: as in a def: "q, k, v, dropout_p=0.0, *, causal=False". Defaults are literals.
        returns: what comes back, in words.
    """

    name: str
    parameters: str
    returns: str

    @cached_property
    def signature(self) -> inspect.Signature:
        """The parameters as `inspect` gives them."""
        return inspect.Signature(list(parse_parameters(self.parameters)))

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Parameter -> default, of those that have one."""
        found = self.signature.parameters.values()
        return {item.name: item.default for item in found if item.default is not _Kind.empty}

    def bind(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        """Match a call's arguments with the parameters, without defaults.

        Raises:
            TypeError: one that the function does not have, a required one that is missing, or a
                position where only a keyword is taken; worded as Python does.
        """
        try:
            return self.signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise TypeError(f"{self.name}() {error}") from None


def parse_parameters(text: str) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a def's argument list.

    Raises:
        SyntaxError: it is none.
        ValueError: a default is no literal.
    """
    function = ast.parse(f"def call({text}): ...").body[0]
    if not isinstance(function, ast.FunctionDef):
        raise SyntaxError(text)
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    for index, (item, default) in enumerate(
        zip(positional, [*missing, *arguments.defaults], strict=True)
    ):
        is_only = index < len(arguments.posonlyargs)
        kind = _Kind.POSITIONAL_ONLY if is_only else _Kind.POSITIONAL_OR_KEYWORD
        yield _parameter(item.arg, kind, default)
    if arguments.vararg is not None:
        yield _Kind(arguments.vararg.arg, _Kind.VAR_POSITIONAL)
    for item, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(item.arg, _Kind.KEYWORD_ONLY, keyword_default)
    if arguments.kwarg is not None:
        yield _Kind(arguments.kwarg.arg, _Kind.VAR_KEYWORD)


def _parameter(name: str, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    value = _Kind.empty if default is None else ast.literal_eval(default)
    return inspect.Parameter(name, kind, default=value)
