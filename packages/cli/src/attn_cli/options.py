"""Makers of options: a heading in the help, and errors that name the value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

__all__ = ["Panel"]


@dataclass(frozen=True, slots=True)
class Panel:
    """Options whose help stands under one heading."""

    title: str | None = None

    def flag(self, name: str, text: str, *short: str, **more: Any) -> Any:
        """Return an option without a value."""
        return self._option(name, *short, help=text, metavar="", **more)

    def word(self, name: str, text: str, metavar: str, **more: Any) -> Any:
        """Return an option with a text, called `metavar` in the help."""
        return self._option(name, help=text, metavar=metavar, **more)

    def integer(self, name: str, text: str, metavar: str = "N") -> Any:
        """Return an option with a whole number; its range is the request's affair."""
        return self._option(name, help=text, metavar=metavar, parser=_parser(int, "an integer"))

    def number(self, name: str, text: str, metavar: str) -> Any:
        """Return an option with a number."""
        return self._option(name, help=text, metavar=metavar, parser=_parser(float, "a number"))

    def _option(self, *names: str, **more: Any) -> Any:
        return typer.Option(*names, rich_help_panel=self.title, **more)


def _parser(kind: Callable[[str], Any], noun: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {noun}") from None

    return parse
