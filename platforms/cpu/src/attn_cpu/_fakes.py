"""What torch needs to trace the ops without running them: shapes of what they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_cpu._ops import WRITING_OPS

__all__ = ["register_fakes"]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for an op that writes into its arguments.

    One meta tensor among those of the host brings a call here, and it would do nothing.
    """
    given = (*args, *kwargs.values())
    devices = {each.device.type for each in given if isinstance(each, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"attn_cpu: device is one of {sorted(devices)}; allowed: one for all")


def _plan(query_start_loc: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand for a plan, whose length depends on the lengths of the batch."""
    del args, kwargs
    size = torch.library.get_ctx().new_dynamic_size()
    return query_start_loc.new_empty(size, dtype=torch.int32)


def register_fakes() -> None:
    """Register the fakes of the ops, after the library has been loaded."""
    for name in WRITING_OPS:
        torch.library.register_fake(f"attn_cpu::{name}", _nothing)
    torch.library.register_fake("attn_cpu::plan", _plan)
