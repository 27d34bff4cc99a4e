"""The smallest attention backend outside attn's own packages: EXAMPLE_EAGER."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
