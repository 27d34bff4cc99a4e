"""The sub-commands of `attn`, a module each."""

from __future__ import annotations

__all__: list[str] = []
