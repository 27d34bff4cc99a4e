"""A batch cut into pieces for the threads, in the library's own form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_cpu._attn_batch import HostBatch
from attn_cpu._ops import op
from attn_shared.request import Window
from attn_shared.spec import LayerSpec
from attn_shared.workspace import Workspace

__all__ = ["NO_LIMITS", "Heads", "Plan", "Sight", "partition", "sight_of"]


class Sight(NamedTuple):
    """What a layer lets a query see, causality aside; layers that agree share a plan."""

    window: Window
    chunk_size: int | None


NO_LIMITS = Sight(window=(None, None), chunk_size=None)


class Heads(NamedTuple):
    """Query heads, kv heads, and the widths of keys and values."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int


class Plan(NamedTuple):
    """A partition of the batch for the threads.

    `pieces` is int32 (n,), the library's own form; `workspace` is uint8 (m,), for partial results.
    """

    pieces: Tensor
    workspace: Tensor


def sight_of(spec: LayerSpec) -> Sight:
    """Return what a layer's queries see."""
    return Sight(window=spec.window, chunk_size=spec.chunk_size)


def partition(
    batch: HostBatch, heads: Heads, sight: Sight, workspace: Workspace, *, is_invariant: bool
) -> Plan:
    """Return the plan of a batch for torch's present number of threads.

    Args:
        batch: lengths and rules of each request.
        heads: of the layer.
        sight: of the layer.
        workspace: where partial results go.
        is_invariant: where a request is split depends on its own length alone.
    """
    pieces: Tensor = op("plan")(
        batch.query_start_loc,
        batch.key_lens,
        *heads,
        batch.is_causal,
        batch.causal_per_request,
        *sight.window,
        sight.chunk_size,
        batch.ranges is not None,
        torch.get_num_threads(),
        is_invariant,
    )
    # Taken here and not in the call: it stays valid when the workspace grows for someone else.
    return Plan(pieces=pieces, workspace=workspace.get(op("workspace_bytes")(pieces)))
