"""Cascade attention: the prefix that all requests share is attended once, then merged by LSE.

`common_prefix_len` finds the prefix, `check_cascade` says where the result is correct, and
`use_cascade` guesses whether it pays.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_shared._integer_checks import check_integers, host_lens
from attn_shared.argument_checks import require_count, require_kind
from attn_shared.errors import InvalidInputError, MetadataError, UnsupportedOptionError
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["check_cascade", "common_prefix_len", "use_cascade"]

_MIN_PREFIX_TOKENS = 256
_MIN_REQUESTS = 8
_TILE = 128  # rows and keys of one tile, for the cost test


def common_prefix_len(
    block_table: torch.Tensor, num_computed: Sequence[int], block_size: int
) -> int:
    """Return how many tokens may be treated as the shared prefix of a batch.

    The leading blocks that all rows name alike, but no more than the shortest request has computed
    (so that every query sees the whole prefix), in whole blocks.

    Args:
        block_table: (B, M) block ids on the host.
        num_computed: (B,) keys of earlier steps.
        block_size: tokens per block.

    Raises:
        InvalidInputError: sizes contradict each other, or a number is negative.
    """
    require_count("block_size", block_size)
    check_integers("block_table", block_table, 2, "(B, M)")
    num_computed = host_lens("num_computed", num_computed)
    if block_table.ndim != 2 or len(block_table) != len(num_computed):
        raise InvalidInputError.for_argument(
            "block_table shape", tuple(block_table.shape), f"({len(num_computed)}, any)"
        )
    shortest = min(num_computed, default=0)
    if shortest < 0:
        raise InvalidInputError.for_argument("num_computed", shortest, "integers >= 0")
    return _num_shared_blocks(block_table[:, : shortest // block_size]) * block_size


def _num_shared_blocks(block_table: torch.Tensor) -> int:
    """Return how many leading entries all rows have in common."""
    if block_table.numel() == 0:
        return 0
    is_shared = (block_table == block_table[:1]).all(0)
    return int(is_shared.long().cumprod(0).sum())


def check_cascade(
    common: CommonAttentionMetadata, common_prefix_len: int, *, block_size: int
) -> None:
    """Refuse a prefix for which cascade attention would give another result than plain attention.

    It is correct if the prefix is whole blocks, no longer than what each request has computed
    before this step, named alike by all rows, and if all rows are causal. A table on a device is
    compared there, at the price of one synchronisation.

    Args:
        common: the batch; needs exact host lengths.
        common_prefix_len: tokens; 0, for no cascade, is always allowed.
        block_size: tokens per block.

    Raises:
        MetadataError: names what does not hold, and the longest prefix that does.
        UnsupportedOptionError: the sequences are sharded over ranks.
    """
    require_count("block_size", block_size)
    require_kind("common", common, CommonAttentionMetadata)
    require_kind("common_prefix_len", common_prefix_len, int)
    if common_prefix_len == 0:
        return
    if common.block_table is None:
        raise MetadataError.for_argument("block_table", None, "a table, for cascade attention")
    if common.dcp_local_seq_lens is not None:
        raise UnsupportedOptionError(
            "cascade attention has no rule for sequences that are sharded over ranks.",
            hint="pass common_prefix_len=0.",
        )
    _check_all_causal(common)
    _check_length(common, common_prefix_len, block_size)
    num_blocks = common_prefix_len // block_size
    if num_blocks > common.block_table.shape[1]:
        raise _refused(common_prefix_len, f"at most {common.block_table.shape[1]} blocks")
    num_shared = _num_shared_blocks(common.block_table[:, :num_blocks])
    if num_shared < num_blocks:
        raise _refused(
            common_prefix_len,
            f"at most {num_shared * block_size}: the rows of block_table differ at {num_shared}",
        )


def _check_length(common: CommonAttentionMetadata, common_prefix_len: int, block_size: int) -> None:
    if common_prefix_len < 0 or common_prefix_len % block_size:
        raise _refused(common_prefix_len, f"multiples of block_size={block_size}")
    computed = common.exact_seq_lens_cpu - common.query_lens_cpu
    shortest = int(computed.min()) if len(computed) else 0
    if common_prefix_len > shortest:
        raise _refused(
            common_prefix_len, f"at most min(seq_len - query_len) = {shortest}, in whole blocks"
        )


def _check_all_causal(common: CommonAttentionMetadata) -> None:
    if common.causal is True:
        return
    rows = None if common.causal_cpu is None else (~common.causal_cpu).nonzero().flatten().tolist()
    if rows is None or rows:
        raise MetadataError.for_argument(
            "causal",
            "False" if rows is None else f"False for rows {rows}",
            "True for all rows, for cascade attention",
            hint="pass common_prefix_len=0.",
        )


def _refused(common_prefix_len: int, allowed: str) -> InvalidInputError:
    return MetadataError.for_argument(
        "common_prefix_len",
        common_prefix_len,
        allowed,
        hint="take what attn_shared.cascade.common_prefix_len returns, or 0 for no cascade.",
    )


def use_cascade(
    *,
    common_prefix_len: int,
    query_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    num_compute_units: int,
    has_alibi: bool = False,
    has_window: bool = False,
    has_chunks: bool = False,
    dcp_size: int = 1,
) -> bool:
    """Whether cascade attention is expected to pay; says nothing about being correct.

    At least 256 tokens and 8 requests, and nothing that cascade kernels lack. Where the plain path
    could not split its keys over compute units (no grouped heads, or several query tokens) cascade
    wins; else the waves of tiles that either needs are compared (vLLM's rule of v0.25.1).

    Args:
        common_prefix_len: tokens.
        query_lens: (B,) query tokens.
        num_heads: query heads of this rank.
        num_kv_heads: kv heads of this rank.
        num_compute_units: of the device.
        has_alibi: the layer has ALiBi slopes.
        has_window: the layer has a sliding window.
        has_chunks: the layer is chunked local attention.
        dcp_size: ranks that share each sequence.

    Raises:
        InvalidInputError: a number is no count, or lengths are no list of ints.
    """
    require_count("common_prefix_len", common_prefix_len, least=0)
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "dcp_size": dcp_size}
    for name, value in {**sizes, "num_compute_units": num_compute_units}.items():
        require_count(name, value)
    query_lens = host_lens("query_lens", query_lens)
    num_reqs = len(query_lens)
    if common_prefix_len < _MIN_PREFIX_TOKENS or num_reqs < _MIN_REQUESTS:
        return False
    if has_alibi or has_window or has_chunks or dcp_size > 1:
        return False
    group = num_heads // num_kv_heads
    if group == 1 or any(length != 1 for length in query_lens):
        return True
    key_tiles = _ceil_div(common_prefix_len, _TILE)
    cascade_tiles = num_heads * _ceil_div(num_reqs, _TILE)
    cascade_time = _ceil_div(cascade_tiles, num_compute_units) * key_tiles
    plain_tiles = num_reqs * num_kv_heads * _ceil_div(group, _TILE) * key_tiles
    return cascade_time < _ceil_div(plain_tiles, num_compute_units)


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
