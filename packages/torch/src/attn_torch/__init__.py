"""Attention backends that need nothing but torch, offered by every platform."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
