"""Hugging Face transformers models on attn's backends."""

from __future__ import annotations

from attn_transformers.paged_cache import CacheUsage, PagedCache
from attn_transformers.registration import implementation_name, register

__all__ = ["CacheUsage", "PagedCache", "__version__", "implementation_name", "register"]

__version__ = "0.1.0"
