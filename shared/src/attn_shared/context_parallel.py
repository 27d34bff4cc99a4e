"""Sequences sharded over ranks: who holds which token, and how partial results are combined.

Token j of a sequence lives on rank (j // interleave) % world_size, where it is the rank's own
token (j // (interleave * world_size)) * interleave + j % interleave. Decode context parallelism
(DCP) takes its ranks from the tensor-parallel group. With prefill context parallelism (PCP) as
well, world_size is pcp_size * dcp_size and a rank is pcp_rank * dcp_size + dcp_rank.

In a step each rank gathers the queries of all heads, attends to its own keys, and combines. Both
combines return the rank's share of the heads; they agree up to rounding and differ in traffic. A
shard without a visible key (LSE of -inf; +inf and NaN, which kernels write for such rows, count
likewise) contributes exactly nothing, whatever its output holds; where all are empty the output
is 0 and the LSE -inf.

With W ranks, T tokens, H heads of width D and e bytes per element, a rank sends, per call,

    cp_lse_ag_out_rs      T * H * 4 * (W - 1)  +  T * H * D * 4 * (W - 1) / W
    dcp_a2a_lse_reduce    T * H * (D * e + 4) * (W - 1) / W

bytes: the first in two collectives, adding in float32 on the way; the second in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from attn_shared._integer_checks import check_batch_tensors, check_count
from attn_shared.argument_checks import (
    count_objection,
    require_floats,
    require_list,
    require_tensor,
)
from attn_shared.errors import (
    InvalidInputError,
    InvalidRequestError,
    MetadataError,
    UnknownNameError,
)
from attn_shared.gradients import require_no_gradients
from attn_shared.kv_write import PAD_SLOT_ID, token_positions
from attn_shared.merge import check_merge, merge_many, to_natural

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "COMBINES",
    "check_dcp",
    "combine_shards",
    "cp_lse_ag_out_rs",
    "dcp_a2a_lse_reduce",
    "local_index",
    "local_seq_lens",
    "local_slot_mapping",
    "owner_of",
    "single_collective",
]

COMBINES = ("ag_rs", "a2a")
"""Names of the two combines: `cp_lse_ag_out_rs` and `dcp_a2a_lse_reduce`."""

_OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_dcp(
    *,
    dcp_size: int,
    tp_size: int,
    interleave: int = 1,
    block_size: int | None = None,
    combine: str = "ag_rs",
) -> None:
    """Refuse a decode-context-parallel set-up that no rank could serve.

    Args:
        dcp_size: ranks that share each sequence.
        tp_size: tensor-parallel ranks, of which the DCP groups are made.
        interleave: consecutive tokens that one rank holds.
        block_size: tokens per block, if there is a paged cache.
        combine: one of `COMBINES`.

    Raises:
        InvalidRequestError: names the field, its value and what is allowed.
        UnknownNameError: there is no such combine.
    """
    for name, value in (("dcp_size", dcp_size), ("tp_size", tp_size), ("interleave", interleave)):
        _require_size(name, value)
    if block_size is not None:
        _require_size("block_size", block_size)
    if tp_size % dcp_size:
        raise InvalidRequestError.for_field("dcp_size", dcp_size, f"a divisor of tp_size={tp_size}")
    if block_size is not None and block_size % interleave:
        raise InvalidRequestError.for_field(
            "interleave", interleave, f"a divisor of block_size={block_size}"
        )
    if combine not in COMBINES:
        raise UnknownNameError.for_name("combine", combine, COMBINES)
    if combine == "a2a" and dcp_size == 1:
        raise InvalidRequestError.for_field(
            "combine", combine, "ag_rs with dcp_size=1: one rank has nobody to exchange with"
        )


def _require_size(name: str, value: object) -> None:
    allowed = count_objection(value)
    if allowed is not None:
        raise InvalidRequestError.for_field(name, value, allowed)


def owner_of(positions: torch.Tensor, world_size: int, interleave: int = 1) -> torch.Tensor:
    """Return the rank that holds each token: integers of the shape of `positions`."""
    _check_place(world_size, None, interleave)
    _check_positions("positions", positions)
    return positions // interleave % world_size


def local_index(positions: torch.Tensor, world_size: int, interleave: int = 1) -> torch.Tensor:
    """Return each token's position among the tokens of the rank that holds it."""
    _check_place(world_size, None, interleave)
    _check_positions("positions", positions)
    return positions // (interleave * world_size) * interleave + positions % interleave


def local_seq_lens(
    seq_lens: torch.Tensor, world_size: int, rank: int | None = None, interleave: int = 1
) -> torch.Tensor:
    """Return how many tokens of each sequence live on a rank.

    Args:
        seq_lens: (B,) integers, on any device.
        world_size: ranks that share each sequence.
        rank: which one; None returns all.
        interleave: consecutive tokens that one rank holds.

    Returns:
        (B,), or (B, world_size) for rank None, in the dtype of `seq_lens`.

    Raises:
        InvalidInputError: the rank is not one of world_size, or a size is not positive.
    """
    _check_place(world_size, rank, interleave)
    _check_positions("seq_lens", seq_lens)
    ranks = torch.arange(world_size, device=seq_lens.device, dtype=seq_lens.dtype)
    if rank is not None:
        ranks = ranks[rank : rank + 1]
    whole_rounds = (seq_lens // (interleave * world_size) * interleave).unsqueeze(-1)
    rest = (seq_lens % (interleave * world_size)).unsqueeze(-1)
    lens = whole_rounds + (rest - ranks * interleave).clamp(0, interleave)
    return lens if rank is None else lens.squeeze(-1)


def local_slot_mapping(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    *,
    world_size: int,
    rank: int,
    interleave: int = 1,
) -> torch.Tensor:
    """Return the slot of each query token in this rank's cache: (T,) int64, -1 for others' tokens.

    Args:
        block_table: (B, M) int32, whose rows name the blocks of this rank's own tokens.
        query_start_loc: (B + 1,) int32.
        seq_lens: (B,) int32, of the whole sequences, this step's tokens included.
        block_size: tokens per block, of this rank's.
        world_size: ranks that share each sequence.
        rank: this one.
        interleave: consecutive tokens that one rank holds.

    Raises:
        InvalidInputError: as `local_seq_lens`, or a tensor is none of integers of that shape, or
            they lie on several devices.
    """
    _check_place(world_size, rank, interleave)
    check_batch_tensors(block_table, query_start_loc, seq_lens)
    check_count("block_size", block_size)
    if len(seq_lens) and not block_table.shape[1]:
        raise MetadataError.for_argument("block_table", "without a column", "(B, M) with M >= 1")
    request, position = token_positions(query_start_loc, seq_lens)
    local = local_index(position.clamp_min(0), world_size, interleave)
    # Another rank's token may have its place past the end of this rank's row.
    column = (local // block_size).clamp_max(block_table.shape[1] - 1)
    slot = block_table[request, column].long() * block_size + local % block_size
    is_own = (position >= 0) & (owner_of(position, world_size, interleave) == rank)
    return torch.where(is_own, slot, PAD_SLOT_ID)


def combine_shards(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    lse_base_on_e: bool | Sequence[bool] = True,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the partial results of all ranks, held by one process.

    What both collectives compute: `merge.merge_many`, with +inf and NaN taken as "no keys".

    Args:
        outputs: each (T, H, D).
        lses: each (H, T) float32.
        lse_base_on_e: the LSEs are natural logarithms (False: log2); one claim for all, or one of
            each shard, which must then be the same.
        sinks: (H,) float32, one extra logit per head that enters the denominator once.

    Returns:
        Output (T, H, D) and natural-log LSE (H, T).

    Raises:
        InvalidInputError: shapes, dtypes or bases differ.
    """
    base_on_e = _one_base(lse_base_on_e)
    require_list("outputs", outputs)
    require_list("lses", lses)
    for lse in lses:
        require_floats("lses", lse)
    naturals = [_without_empties(lse, base_on_e) for lse in lses]
    if sinks is None:
        return merge_many(outputs, naturals)
    check_merge(outputs, naturals)
    _check_sinks(sinks, outputs[0].shape[1])
    # A shard of one key with the sink's logit and a value of zero.
    sink_lse = sinks.unsqueeze(1).expand_as(naturals[0])
    return merge_many([*outputs, torch.zeros_like(outputs[0])], [*naturals, sink_lse])


def cp_lse_ag_out_rs(
    output: torch.Tensor,
    lse: torch.Tensor,
    group: ProcessGroup,
    *,
    lse_base_on_e: bool = True,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine over a group: all-gather the LSEs, scale, reduce-scatter the outputs over heads.

    Args:
        output: (T, H, D), this rank's partial result for all H heads; the same T on all ranks.
        lse: (H, T) float32.
        group: the ranks that share the sequences.
        lse_base_on_e: the LSE is a natural logarithm (False: log2), on all ranks.
        sinks: (H,) float32, of all heads: one extra logit per head, on no shard's account yet.

    Returns:
        Output (T, H / W, D) and natural-log LSE (H / W, T) of this rank's heads, those that start
        at rank * H / W.

    Raises:
        InvalidInputError: shapes or dtypes do not fit, or W does not divide H; on every rank, and
            before any of them communicates.
        UnsupportedOptionError: a gradient is asked for: none crosses the ranks.
    """
    require_no_gradients("cp_lse_ag_out_rs", {"output": output, "lse": lse, "sinks": sinks})
    world_size = dist.get_world_size(group)
    num_heads = _check_shard(output, lse, world_size)
    if sinks is not None:
        _check_sinks(sinks, output.shape[1])
    if output.shape[0] == 0:
        return output[:, :num_heads], lse[:num_heads]
    own = _without_empties(lse, lse_base_on_e)
    gathered = own.new_empty((world_size * own.shape[0], own.shape[1]))
    single_collective("all_gather_single", "all_gather_into_tensor")(gathered, own, group=group)
    total = gathered.view(world_size, *own.shape).logsumexp(0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.unsqueeze(1))
    is_empty = own == -math.inf
    weight = torch.where(is_empty, 0.0, (own - total).exp()).unsqueeze(-1)
    share = output.transpose(0, 1).float() * weight
    share = torch.where(is_empty.unsqueeze(-1), 0.0, share).contiguous()
    merged = share.new_empty((num_heads, *share.shape[1:]))
    single_collective("reduce_scatter_single", "reduce_scatter_tensor")(merged, share, group=group)
    first = dist.get_rank(group) * num_heads
    heads = slice(first, first + num_heads)
    return merged.transpose(0, 1).to(output.dtype).contiguous(), total[heads]


def dcp_a2a_lse_reduce(
    output: torch.Tensor,
    lse: torch.Tensor,
    group: ProcessGroup,
    *,
    lse_base_on_e: bool = True,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine over a group: one all-to-all of outputs and LSEs by heads, then a local sum.

    The 32 bits of an LSE travel behind its output, as elements of the output's dtype.

    Args:
        output: as in `cp_lse_ag_out_rs`.
        lse: (H, T) float32.
        group: the ranks that share the sequences.
        lse_base_on_e: the LSE is a natural logarithm (False: log2), on all ranks.
        sinks: (H,) float32, of all heads.

    Returns:
        As `cp_lse_ag_out_rs`.

    Raises:
        InvalidInputError: as `cp_lse_ag_out_rs`.
        UnsupportedOptionError: likewise.
    """
    require_no_gradients("dcp_a2a_lse_reduce", {"output": output, "lse": lse, "sinks": sinks})
    world_size = dist.get_world_size(group)
    num_heads = _check_shard(output, lse, world_size)
    if sinks is not None:
        _check_sinks(sinks, output.shape[1])
        first = dist.get_rank(group) * num_heads
        sinks = sinks[first : first + num_heads]
    num_tokens, _, width = output.shape
    if num_tokens == 0:
        return output[:, :num_heads], lse[:num_heads]
    bits = lse.contiguous().unsqueeze(-1).view(output.dtype)
    sent = torch.cat([output.transpose(0, 1), bits], dim=-1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    shards = received.view(world_size, num_heads, num_tokens, -1)
    outputs = [shard[..., :width].transpose(0, 1) for shard in shards]
    lses = [shard[..., width:].contiguous().view(torch.float32).squeeze(-1) for shard in shards]
    merged, total = combine_shards(outputs, lses, lse_base_on_e=lse_base_on_e, sinks=sinks)
    return merged.contiguous(), total


def _one_base(lse_base_on_e: bool | Sequence[bool]) -> bool:
    """Return the claim that all shards make of their LSE."""
    if isinstance(lse_base_on_e, bool):
        return lse_base_on_e
    bases = {bool(base) for base in lse_base_on_e}
    if len(bases) != 1:
        raise InvalidInputError.for_argument(
            "lse_base_on_e",
            list(lse_base_on_e),
            "the same for all shards",
            hint="convert each shard by merge.to_natural first: a sum of powers of 2 and of e is "
            "no denominator.",
        )
    return bases.pop()


def _check_sinks(sinks: torch.Tensor, num_heads: int) -> None:
    require_tensor("sinks", sinks)
    if tuple(sinks.shape) != (num_heads,) or sinks.dtype != torch.float32:
        raise InvalidInputError.for_argument(
            "sinks", f"{sinks.dtype} {tuple(sinks.shape)}", f"torch.float32 ({num_heads},)"
        )


def _without_empties(lse: torch.Tensor, lse_base_on_e: bool) -> torch.Tensor:
    """Return a contiguous natural-log LSE in which every sign of "no keys" is -inf."""
    natural = to_natural(lse, lse_base_on_e=lse_base_on_e)
    return natural.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf).contiguous()


def single_collective(name: str, older_name: str) -> Callable[..., Any]:
    """Return a collective under the name that the installed torch does not deprecate."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older_name)
    return found


def _check_positions(name: str, value: object) -> None:
    require_tensor(name, value)
    if isinstance(value, torch.Tensor) and value.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError.for_argument(name, f"of {value.dtype}", "of int32 or int64")


def _check_place(world_size: int, rank: int | None, interleave: int) -> None:
    for name, value in (("world_size", world_size), ("interleave", interleave)):
        check_count(name, value)
    if rank is None:
        return
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise InvalidInputError.for_argument("rank", repr(rank), f"0 to {world_size - 1}")


def _check_shard(output: torch.Tensor, lse: torch.Tensor, world_size: int) -> int:
    """Return how many heads each rank gets, after checking that the shard can be combined."""
    require_tensor("output", output)
    require_tensor("lse", lse)
    if output.dim() != 3 or output.dtype not in _OUTPUT_DTYPES:
        raise InvalidInputError.for_argument(
            "output", f"{output.dtype} {tuple(output.shape)}", "(T, H, D) of 16 or 32-bit floats"
        )
    expected = (output.shape[1], output.shape[0])
    if tuple(lse.shape) != expected or lse.dtype != torch.float32 or lse.device != output.device:
        raise InvalidInputError.for_argument(
            "lse",
            f"{lse.dtype} {tuple(lse.shape)} on {lse.device}",
            f"torch.float32 {expected} on {output.device}",
        )
    if output.shape[1] % world_size:
        raise InvalidInputError.for_argument(
            "heads of output", output.shape[1], f"a multiple of the group's {world_size} ranks"
        )
    return output.shape[1] // world_size
