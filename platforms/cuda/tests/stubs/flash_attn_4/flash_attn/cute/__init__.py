"""What flash-attn-4 4.0.0b36 exports, of what is used here."""

from __future__ import annotations

from flash_attn.cute.interface import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func"]
__version__ = "0.0.0"
