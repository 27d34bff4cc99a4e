"""Contracts, selection and the exact reference of the attn project.

The public names live in the modules of this package; `attn_shared.selector` is where to begin.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
