"""All rules, in the order in which they are run and shown."""

from __future__ import annotations

from collections.abc import Collection

from attn_conformance.rule import Rule
from attn_conformance.rules import (
    batches,
    builder,
    cache,
    generated,
    graphs,
    heads,
    logits,
    lse,
    masks,
    quantised,
    reads,
    refusals,
    tensors,
)
from attn_shared.errors import UnknownNameError

__all__ = ["RULES", "rules_named"]

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
    *graphs.RULES,
    *generated.RULES,
)
"""Every rule. Those of multi-head latent attention will be one more module."""


def rules_named(names: Collection[str]) -> tuple[Rule, ...]:
    """Return the rules of these names, in their order; all of them for no name.

    Raises:
        UnknownNameError: there is no such rule; the message lists them.
    """
    known = {rule.name: rule for rule in RULES}
    for name in names:
        if name not in known:
            raise UnknownNameError.for_name("rule", name, known)
    return tuple(rule for rule in RULES if not names or rule.name in names)
