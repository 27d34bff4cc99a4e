"""Prefills over latents, one file each; see `attn_shared.mla_prefill`."""

from __future__ import annotations

__all__: list[str] = []
