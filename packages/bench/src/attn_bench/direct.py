"""What a vendor's direct call is made of, and what all of them refuse alike."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_bench.workloads import Workload
from attn_shared.errors import UnsupportedOptionError

__all__ = ["DirectCalls", "first_of", "itself", "refuse_cache_dtype", "second_of"]


def itself(result: Any) -> Tensor:
    """Return the result, where a call returns its output alone."""
    if not isinstance(result, Tensor):
        raise TypeError(f"a call returned a {type(result).__name__}, and should return a tensor")
    return result


def first_of(result: Any) -> Tensor:
    """Return the output, where a call returns it with more."""
    return itself(result[0])


def second_of(result: Any) -> Tensor:
    """Return the LSE, where it follows the output."""
    return itself(result[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectCalls:
    """A library's calls over the layers of a step.

    Attributes:
        calls: one for each layer.
        tokens: turns what a call returns into (T, Hq, D).
        lse: turns it into (Hq, T), natural logarithm; None where no LSE was asked for.
        plan: the library's own host work of a step; None where it has none.
        compute_dtype: of its products, where it is not the query's.
        notes: what a reader of the figures must know.
    """

    calls: tuple[Callable[[], Any], ...]
    tokens: Callable[[Any], Tensor] = itself
    lse: Callable[[Any], Tensor] | None = None
    plan: Callable[[], object] | None = None
    compute_dtype: torch.dtype | None = None
    notes: tuple[str, ...] = ()


def refuse_cache_dtype(name: str, workload: Workload, allowed: Collection[str]) -> None:
    """Refuse a cache in a format that a library does not read.

    Raises:
        UnsupportedOptionError: names the format and those that it reads.
    """
    if workload.kv_cache_dtype not in allowed:
        raise UnsupportedOptionError(
            f"{name} reads no cache of kv_cache_dtype={workload.kv_cache_dtype}; "
            f"allowed: {', '.join(allowed)}."
        )
