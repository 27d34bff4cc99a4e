"""Measuring attention backends beside a peer and against the machine's limit."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
