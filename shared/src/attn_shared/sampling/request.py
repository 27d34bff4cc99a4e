"""What is asked of a sampler, as far as the choice of a sampler depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from attn_shared._fields import member_of, require_bool

__all__ = ["Returns", "SamplerRequest"]


class Returns(StrEnum):
    """What a caller wants beside the drawn ids."""

    IDS = "ids"
    PROCESSED_LOGITS = "processed_logits"
    """The logits after temperature and filters, -inf where a filter removed a token."""
    PROCESSED_LOGPROBS = "processed_logprobs"
    """Their log-softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRequest:
    """The kind of a call; numbers such as k itself do not matter to the choice.

    Attributes:
        top_k, top_p, min_p: whether some row may have that filter on.
        own_draws: whether rows have seeds or generators of their own, so that a row's draw must
            not depend on what shares the batch.
        returns: what is wanted beside ids.
    """

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    own_draws: bool = False
    returns: Returns = Returns.IDS

    def __post_init__(self) -> None:
        """Refuse what is no flag, and take the name of what is returned for itself."""
        for name in ("top_k", "top_p", "min_p", "own_draws"):
            require_bool(name, getattr(self, name))
        object.__setattr__(self, "returns", member_of(Returns, "returns", self.returns))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        return {
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "own_draws": self.own_draws,
            "returns": str(self.returns),
        }
