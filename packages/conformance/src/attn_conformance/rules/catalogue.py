"""All rules, in the order in which they are run and shown."""

from __future__ import annotations

from collections.abc import Collection

from attn_conformance.rule import Rule
from attn_conformance.rules import (
    batches,
    builder,
    cache,
    field_cases,
    generated,
    graphs,
    heads,
    logits,
    lse,
    masks,
    mla,
    mla_cache,
    mla_graphs,
    mla_refusals,
    quantised,
    reads,
    refusals,
    tensors,
)
from attn_shared.errors import UnknownNameError

__all__ = ["MLA_RULES", "RULES", "rules_named"]

RULES: tuple[Rule, ...] = (
    *refusals.RULES,
    *tensors.RULES,
    *builder.RULES,
    *cache.RULES,
    *reads.RULES,
    *masks.RULES,
    *logits.RULES,
    *heads.RULES,
    *lse.RULES,
    *quantised.RULES,
    *batches.RULES,
    *field_cases.RULES,
    *graphs.RULES,
    *generated.RULES,
)
"""Every rule of ordinary attention."""

MLA_RULES: tuple[Rule, ...] = (
    *mla_refusals.RULES,
    *mla.RULES,
    *mla_cache.RULES,
    *mla_graphs.RULES,
)
"""Every rule of multi-head latent attention."""


def rules_named(names: Collection[str], *, is_mla: bool = False) -> tuple[Rule, ...]:
    """Return the rules of these names, in their order; for no name all of a kind of attention.

    Args:
        names: of either kind.
        is_mla: latent attention is meant where no name is given.

    Raises:
        UnknownNameError: there is no such rule; the message lists them.
    """
    if not names:
        return MLA_RULES if is_mla else RULES
    every = (*RULES, *MLA_RULES)
    known = {rule.name: rule for rule in every}
    for name in names:
        if name not in known:
            raise UnknownNameError.for_name("rule", name, known)
    return tuple(rule for rule in every if rule.name in names)
