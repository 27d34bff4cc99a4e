"""What a call of FlashAttention is made of: the step's tensors, the layer's extras, their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from attn_shared.keyless import Keyless
from attn_shared.request import Window

__all__ = ["Call", "Extras", "KeyStep", "sides"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyStep:
    """Queries and keys of one call, as the layers of a step share them.

    Attributes:
        query_start_loc: (B + 1,) int32.
        max_query_len: host bound.
        max_key_len: host bound.
        causal: bottom-right aligned.
        key_lens: (B,) int32, of keys in pages.
        key_start_loc: (B + 1,) int32: where each request's keys begin in a call that brings them;
            for FlashAttention 2 also prefix sums of `key_lens`.
        block_table: (B, M) int32, or None for keys that come with the call.
        num_splits: parts that the keys of a request are cut into; 0 leaves it to the kernel.
        schedule: what the library worked out ahead of the layers, or None.
        keyless: the requests that have keys here alone, and whose rows are to be set; or None.
    """

    query_start_loc: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
    key_lens: Tensor | None = None
    key_start_loc: Tensor | None = None
    block_table: Tensor | None = None
    num_splits: int = 0
    schedule: Tensor | None = None
    keyless: Keyless | None = None

    def with_schedule(self, schedule: Tensor) -> KeyStep:
        """Return the step with a schedule; `dataclasses.replace` costs the host twice as much."""
        return KeyStep(
            query_start_loc=self.query_start_loc,
            max_query_len=self.max_query_len,
            max_key_len=self.max_key_len,
            causal=self.causal,
            key_lens=self.key_lens,
            key_start_loc=self.key_start_loc,
            block_table=self.block_table,
            num_splits=self.num_splits,
            schedule=schedule,
            keyless=self.keyless,
        )

    @property
    def num_reqs(self) -> int:
        """B."""
        return self.query_start_loc.shape[0] - 1


@dataclass(slots=True, kw_only=True, eq=False)
class Extras:
    """What a call has beside tensors and lengths.

    Attributes:
        with_lse: the LSE is wanted.
        out: (T, Hq, Dv) to write to, for libraries that take one.
        sinks: (Hq,) of the dtype that the library takes.
        slopes: (Hq,) float32.
        descales: of query, key and value, each (B, Hkv) float32; None without fp8.
    """

    with_lse: bool = False
    out: Tensor | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    descales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)


Call = Callable[[Tensor, Tensor, Tensor, KeyStep, Extras], tuple[Tensor, Tensor | None]]
"""(query (T, Hq, D), key, value, step, extras) -> output (T, Hq, Dv), and LSE (Hq, T) if wanted."""


def sides(window: Window, unbounded: int | None) -> tuple[int | None, int | None]:
    """Return a window as kernels take it, an unbounded side written as the library writes it."""
    left, right = window
    return (unbounded if left is None else left, unbounded if right is None else right)
