"""The contract of attn as rules that are run on a backend, by its name."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
