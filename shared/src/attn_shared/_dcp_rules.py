"""Which requests cannot be spread over ranks, whatever backend runs them.

A row sees a run of a rank's own keys (`attn_shared._dcp_batch`); what is no such run, or gives each
row another width of it, has no ordinary batch that stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from attn_shared.request import AttentionRequest, AttentionType

__all__ = ["Objection", "dcp_objections", "pcp_objections"]


class Objection(NamedTuple):
    """The fields of a `capability.Reason`."""

    code: str
    value: str
    allowed: str


def dcp_objections(request: AttentionRequest) -> Iterator[Objection]:
    """Yield why the cache of a request cannot be sharded; nothing where it is not to be."""
    if request.dcp_size == 1:
        return
    size = f"with dcp_size={request.dcp_size}"
    if request.attn_type is not AttentionType.DECODER:
        yield Objection("dcp_attn_type", str(request.attn_type), f"decoder {size}")
    if request.chunk_size is not None:
        yield Objection("dcp_chunked_local", str(request.chunk_size), f"None {size}")
    if request.use_sparse:
        yield Objection("dcp_sparse", "True", f"False {size}")
    is_plain = request.is_causal and not request.use_mm_prefix
    if request.has_window and not is_plain:
        allowed = f"no window for rows that are not causal, or in multimodal ranges, {size}"
        yield Objection("dcp_window", str(request.window), allowed)
    if request.has_alibi and not is_plain:
        allowed = f"False for rows that are not causal, or in multimodal ranges, {size}"
        yield Objection("dcp_alibi", "True", allowed)


def pcp_objections(request: AttentionRequest) -> Iterator[Objection]:
    """Yield why the tokens of a request cannot be split; nothing where they are not to be."""
    if request.pcp_size == 1:
        return
    size = f"with pcp_size={request.pcp_size}"
    if request.attn_type is not AttentionType.DECODER:
        yield Objection("pcp_attn_type", str(request.attn_type), f"decoder {size}")
    if request.use_mla:
        yield Objection("pcp_mla", "True", f"False {size}")
    if request.use_mm_prefix:
        yield Objection("pcp_mm_prefix", "True", f"False {size}")
    if not request.is_causal and (request.has_window or request.has_alibi):
        what = f"window={request.window}, alibi={request.has_alibi}"
        yield Objection("pcp_non_causal", what, f"neither without a causal mask, {size}")
