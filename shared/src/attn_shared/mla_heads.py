"""Head counts for kernels over latents that are built for a few of them.

All heads of a request read the same latents, so that a query may carry more heads than the layer
has: those that are added repeat others, and their results are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attn_shared.capability import Reason
from attn_shared.errors import UnsupportedOptionError

__all__ = ["head_count_objection", "kernel_heads", "padded_heads"]


def kernel_heads(num_heads: int, counts: Sequence[int]) -> int:
    """Return the smallest of a kernel's head counts that holds a layer's.

    Raises:
        UnsupportedOptionError: none does.
    """
    found = [count for count in sorted(counts) if count >= num_heads]
    if not found:
        raise UnsupportedOptionError(
            f"num_heads={num_heads} is not served by a kernel of {_words(counts)} heads; allowed: "
            f"at most {max(counts)}."
        )
    return found[0]


def head_count_objection(num_heads: int, counts: Sequence[int]) -> Reason | None:
    """Return why a layer has too many heads for a kernel of some counts; None where it has not."""
    if num_heads <= max(counts):
        return None
    return Reason(
        code="num_heads",
        value=str(num_heads),
        allowed=f"at most {max(counts)}: the kernel has {_words(counts)} heads, to which fewer are "
        "padded",
    )


def padded_heads(query: Tensor, num_heads: int) -> Tensor:
    """Return a query (T, H, D) with as many heads as a kernel has; the first H are the caller's.

    Args:
        query: (T, H, D).
        num_heads: of the kernel, at least H.

    Raises:
        UnsupportedOptionError: H is more than that.
    """
    count = query.shape[1]
    if count == num_heads:
        return query
    times = -(-kernel_heads(count, (num_heads,)) // count)
    return query.repeat(1, times, 1)[:, :num_heads].contiguous()


def _words(counts: Sequence[int]) -> str:
    return " or ".join(map(str, sorted(counts)))
