"""What a person sees: answers as tables of rich. Imported only where one is printed."""

from __future__ import annotations

__all__: list[str] = []
