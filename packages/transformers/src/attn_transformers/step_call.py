"""What the layers of one pass have in common, found out by the first of them.

A model calls its attention function once per layer with the same mask, options and shapes. What
follows from those (the rules, the kind of layer, the pass's plan) is found out, and refused, at the
first of these calls and remembered on the mask. A later call is compared with it, argument by
argument: what differs in any goes the long way, with all checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attn_shared.layer import Attention
from attn_transformers.groups import LayerGroup
from attn_transformers.new_tokens import NewTokens
from attn_transformers.turns import Turn

if TYPE_CHECKING:
    from attn_transformers.paged_cache import PagedCache

__all__ = ["LATEST_CALL", "Arguments", "StepCall", "call_of"]

LATEST_CALL = "latest call"
"""Where a `StepMask.memo` has the latest `StepCall`."""

Arguments = tuple[Any, bool | None, int | None, float | None, float | None]
"""The attention function, is_causal, sliding_window, softcap and scaling of a call."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCall:
    """A call that was served over a `PagedCache`.

    Attributes:
        arguments: of the call.
        shapes: of query, key and value.
        dtype, device: of query.
        cache: where the keys went.
        group: the layer's group in it.
        attention: what ran the layer.
        turn: the pass.
    """

    arguments: Arguments
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    cache: PagedCache
    group: LayerGroup
    attention: Attention
    turn: Turn

    def covers(
        self,
        note: NewTokens,
        arguments: Arguments,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> bool:
        """Whether another layer's call, with the same mask, is answered in the same way.

        A layer that attends for the first time joins the group then.
        """
        turn, group = self.turn, self.group
        return (
            group.turn_now is turn  # rows were neither cropped nor chosen since
            and note.cache is self.cache
            and note.start == turn.start
            and not note.is_written
            and arguments == self.arguments
            and (query.shape, key.shape, value.shape) == self.shapes
            and query.dtype is self.dtype
            and query.device == self.device
            and self.cache.group_of.setdefault(note.layer, group) is group  # or it has none yet
        )

    def run(
        self, note: NewTokens, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write and attend to a layer's tokens, as `PagedCache.attend`, for a call it covers."""
        group, attention = self.group, self.attention
        return self.cache.run(note, group, self.turn, attention, query, key, value)


def call_of(
    note: NewTokens,
    attention: Attention,
    arguments: Arguments,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> StepCall | None:
    """Return what further layers' calls are compared with, after a call was served.

    None where it read its tokens again: such layers have passes of their own.
    """
    group = note.cache.group_of[note.layer]
    turn = group.turn_now
    if turn is None or (turn.start, turn.stop) != (note.start, note.start + query.shape[2]):
        return None
    return StepCall(
        arguments=arguments,
        shapes=(query.shape, key.shape, value.shape),
        dtype=query.dtype,
        device=query.device,
        cache=note.cache,
        group=group,
        attention=attention,
        turn=turn,
    )
