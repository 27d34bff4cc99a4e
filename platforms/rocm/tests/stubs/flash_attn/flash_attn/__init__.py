"""What flash-attn 2.8.3 exports, of what is used here."""

from __future__ import annotations

from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]
