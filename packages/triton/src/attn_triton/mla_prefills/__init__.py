"""One module per prefill over latents."""

from __future__ import annotations

__all__: list[str] = []
