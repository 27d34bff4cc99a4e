"""The rules, a module for each group of them."""

from __future__ import annotations

__all__: list[str] = []
