"""How the kernels over latents are launched on an architecture, for compiling them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attn_triton.variants import KernelVariant

__all__ = ["mla_decode_variants"]


def mla_decode_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how few query tokens are attended for."""
    yield from ()
