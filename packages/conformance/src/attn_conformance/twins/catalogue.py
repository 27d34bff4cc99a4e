"""All broken twins."""

from __future__ import annotations

from attn_conformance.twins import (
    batches,
    builders,
    cache,
    failing,
    heads,
    logits,
    lse,
    masks,
    quantised,
    reads,
    refusals,
    tensors,
    writes,
)
from attn_conformance.twins.twin import Twin

__all__ = ["TWINS"]

TWINS: tuple[type[Twin], ...] = (
    *refusals.TWINS,
    *tensors.TWINS,
    *builders.TWINS,
    *cache.TWINS,
    *writes.TWINS,
    *reads.TWINS,
    *masks.TWINS,
    *logits.TWINS,
    *heads.TWINS,
    *lse.TWINS,
    *quantised.TWINS,
    *batches.TWINS,
    *failing.TWINS,
)
"""Every twin; every rule of `rules.catalogue` is broken by one of them at least."""
