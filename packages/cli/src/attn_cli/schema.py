"""Version of the JSON that the commands print."""

from __future__ import annotations

__all__ = ["SCHEMA_VERSION"]

SCHEMA_VERSION = 1
"""Grows when a key changes its meaning or goes away; new keys may come at any time."""
