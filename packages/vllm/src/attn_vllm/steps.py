"""One step of vLLM's engine, as the layers of one group share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attn_shared.errors import InvalidInputError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import LayerSpec

if TYPE_CHECKING:
    from attn_vllm.impl import Bound

__all__ = ["PlanKey", "Step", "plan_key"]

PlanKey = tuple[str, LayerSpec]
"""Layers of one key share one plan: their backend, and all that describes them but whose cache
they read."""


def plan_key(bound: Bound) -> PlanKey:
    """Return which plan a layer runs by."""
    return (bound.name, replace(bound.spec, kv_sharing_target=None))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one step's layers share.

    Attributes:
        common: the batch.
        plans: each backend's own metadata.
    """

    common: CommonAttentionMetadata
    plans: Mapping[PlanKey, Any]

    def metadata_of(self, bound: Bound) -> Any:
        """Return the metadata of a layer.

        Raises:
            InvalidInputError: the step was built for layers of another kind.
        """
        if len(self.plans) == 1:
            return next(iter(self.plans.values()))
        key = plan_key(bound)
        if key not in self.plans:
            raise InvalidInputError.for_argument(
                "attn_metadata", f"of {len(self.plans)} other kinds of layers", "of this layer's"
            )
        return self.plans[key]
