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
    mla,
    mla_prefills,
    quantised,
    reads,
    refusals,
    tensors,
    writes,
)
from attn_conformance.twins.mla import MLATwin
from attn_conformance.twins.twin import Twin

__all__ = ["MLA_TWINS", "TWINS"]

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
"""Every twin of ordinary attention; every rule of it is broken by one of them at least."""

MLA_TWINS: tuple[type[MLATwin], ...] = (*mla.TWINS, *mla_prefills.TWINS)
"""The same of latent attention."""
