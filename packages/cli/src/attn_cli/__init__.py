"""The command `attn`: what this machine offers, which backend is chosen, and why."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
