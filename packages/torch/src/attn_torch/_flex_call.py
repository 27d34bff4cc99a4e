"""The two ways to call flex_attention: through torch.compile, and the operator as it is.

Both are imported on first use: they bring torch's compiler with them.
"""

from __future__ import annotations

import math
import types
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_torch._flex_masks import MaskMod, ScoreMod

__all__ = ["BlockSparsity", "FlexResult", "call_compiled", "call_uncompiled", "load"]

_LN_2 = math.log(2.0)
_WHOLE = 1 << 30  # a block size of the block mask that no sequence reaches: one block


class FlexResult(NamedTuple):
    """Output (n, H, Q, Dv) in the query's dtype, and LSE (n, H, Q) float32 in natural log."""

    output: Tensor
    lse: Tensor | None


class BlockSparsity(NamedTuple):
    """Which blocks of keys each tile visits.

    num_blocks is (n, 1, 1) int32, indices (n, 1, 1, W) int32, of which the first num_blocks count;
    a block holds `key_block` keys, and a tile's queries are one block of at most `query_block`.
    """

    num_blocks: Tensor
    indices: Tensor
    query_block: int
    key_block: int


def load() -> None:
    """Import flex_attention and with it torch's compiler."""
    from torch._higher_order_ops.flex_attention import flex_attention  # noqa: F401


@torch.no_grad()
def call_uncompiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask_mod: MaskMod,
    score_mod: ScoreMod | None,
    scale: float,
) -> FlexResult:
    """Attend by the operator's own torch code, which holds all scores in memory at once.

    The public function would compile a wrapper around the operator for each new combination of
    shapes, give up after eight, and warn. The operator returns its LSE in log2, whatever runs it.

    Args:
        query: (n, H, Q, D).
        key: (n, H, K, D).
        value: (n, H, K, Dv).
        mask_mod: who sees whom.
        score_mod: what becomes of scaled products, or None.
        scale: factor on q.k.
    """
    from torch._higher_order_ops.flex_attention import flex_attention

    one = torch.ones((1, 1, 1), dtype=torch.int32, device=query.device)
    mask = _block_mask(
        BlockSparsity(one, one.new_zeros((1, 1, 1, 1)), _WHOLE, _WHOLE),
        mask_mod,
        (query.shape[2], key.shape[2]),
    )
    output, lse, *_ = flex_attention(
        query, key, value, score_mod or _unchanged, mask.as_tuple(), scale, {}
    )
    return FlexResult(output, lse * _LN_2)


@torch.no_grad()
def call_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    blocks: BlockSparsity,
    mask_mod: MaskMod,
    score_mod: ScoreMod | None,
    scale: float,
    kernel_options: dict[str, Any] | None,
    with_lse: bool,
    kind: Hashable,
) -> FlexResult:
    """Attend by the kernel that torch.compile makes, which visits the named blocks alone.

    Args:
        query: (n, H, Q, D).
        key: (1, H, K, D), shared by all tiles.
        value: (1, H, K, Dv).
        blocks: which keys each tile visits.
        mask_mod: who sees whom.
        score_mod: what becomes of scaled products, or None.
        scale: factor on q.k.
        kernel_options: of the kernel, or None.
        with_lse: whether the LSE is wanted; not to be had on a CPU.
        kind: all that makes another kernel necessary; calls of one kind share a compilation.
    """
    mask = _block_mask(blocks, mask_mod, (query.shape[2], key.shape[2]))
    attend = _compiled(query.device.type, with_lse, kind)
    result = attend(query, key, value, score_mod, mask, scale, kernel_options)
    return FlexResult(*result) if with_lse else FlexResult(result, None)


def _block_mask(blocks: BlockSparsity, mask_mod: MaskMod, lengths: tuple[int, int]) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=blocks.num_blocks,
        kv_indices=blocks.indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(blocks.query_block, blocks.key_block),
        mask_mod=mask_mod,
    )


@lru_cache(maxsize=256)
def _compiled(device_type: str, with_lse: bool, kind: Hashable) -> Any:
    """Return a compiled function of its own for each kind.

    torch.compile counts recompilations per code object and stops compiling after eight, so that
    layers of different kinds must not share one.

    Shapes are static on a CPU: with symbolic ones torch 2.13 generates C++ that does not compile
    (it replaces the name of one size inside the name of another). They are padded to powers of
    two instead. Elsewhere they become symbolic once they vary.
    """
    body = _lse_body() if with_lse else _attend
    own = types.FunctionType(body.__code__.replace(co_name=f"{body.__name__}_own"), globals())
    return torch.compile(own, fullgraph=True, dynamic=False if device_type == "cpu" else None)


def _lse_body() -> Any:
    from torch.nn.attention import flex_attention

    # torch 2.8 has no AuxRequest; its way was not run here.
    has_request = hasattr(flex_attention, "AuxRequest")
    return _attend_with_lse if has_request else _attend_with_lse_before_2_9


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: Any,
    scale: float,
    kernel_options: Any,
) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(
        query, key, value, score_mod, block_mask, scale, kernel_options=kernel_options
    )


def _attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: Any,
    scale: float,
    kernel_options: Any,
) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    output, aux = flex_attention(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        kernel_options=kernel_options,
        return_aux=AuxRequest(lse=True),
    )
    return output, aux.lse


def _attend_with_lse_before_2_9(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: Any,
    scale: float,
    kernel_options: Any,
) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        kernel_options=kernel_options,
        return_lse=True,
    )


def _unchanged(score: Tensor, tile: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score
