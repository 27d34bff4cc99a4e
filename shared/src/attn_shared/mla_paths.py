"""Which rows over latents decode, in words: what all their backends say of their kernels."""

from __future__ import annotations

from typing import Any

from attn_shared.kernel_paths import KernelPath
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_heads import kernel_heads
from attn_shared.mla_metadata import MLAQuerySupport
from attn_shared.request import AttentionRequest

__all__ = ["decode_path", "heads_because"]


def decode_path(
    builder: type[MLAMetadataBuilder[Any]],
    kernel: str,
    why: str = "",
    *,
    rows: str = "decodes",
) -> KernelPath:
    """Return the way of a request's decodes.

    Args:
        builder: of the backend, which says which rows those are.
        kernel: what runs them.
        why: what else decides so.
        rows: what they are called.
    """
    words = (why, _rows_because(builder))
    return KernelPath(rows=rows, kernel=kernel, why="; ".join(filter(None, words)))


def heads_because(request: AttentionRequest, counts: tuple[int, ...]) -> str:
    """Say how a layer's heads become those of a kernel that is built for a few counts."""
    found = kernel_heads(request.num_heads, counts)
    if found == request.num_heads:
        return f"{found} heads, as the kernel has"
    return f"{request.num_heads} heads, padded to the kernel's {found}"


def _rows_because(builder: type[MLAMetadataBuilder[Any]]) -> str:
    if builder.query_support is MLAQuerySupport.SINGLE:
        return "requests of one query token"
    most = builder.most_decode_tokens()  # over shards as well: longer rows gather latents
    if most == 1:
        limit = "requests of one query token, or of one and its drafts"
    else:
        limit = f"requests of up to {most} query tokens"
    if builder.query_support is MLAQuerySupport.UNIFORM:
        return f"{limit}, all of one length"
    return limit
