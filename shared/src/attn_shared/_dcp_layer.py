"""Decode context parallelism for any backend that returns its LSE.

Each rank of the group holds its own query heads, the same kv heads, and a share of the tokens. In a
step it gathers the queries of all heads, attends to its own keys by the backend, as one or a few
ordinary batches (`attn_shared._dcp_batch`), and the ranks combine outputs and LSEs by heads. What
an ordinary batch cannot say is done here: sinks enter the denominator once, in the combine, and
ALiBi's bias by absolute distance is a bias by the rank's own distance, steeper by the world size,
plus a constant per row that moves the LSE alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_shared._dcp_batch import Shard, ShardPart, shard_parts
from attn_shared.context_parallel import (
    cp_lse_ag_out_rs,
    dcp_a2a_lse_reduce,
    local_seq_lens,
    single_collective,
)
from attn_shared.errors import InvalidRequestError, MetadataError, UnsupportedOptionError
from attn_shared.impl import AttentionImplBase, AttentionLayer
from attn_shared.merge import merge_attn_states, to_natural
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ranks import ContextParallel, NoGroup, compare_ranks, gather_objects
from attn_shared.spec import LayerSpec

if TYPE_CHECKING:
    from attn_shared.backend import AttentionMetadataBuilder

__all__ = ["Build", "Call", "DcpLayer", "DcpStep", "call_forward", "call_forward_mqa"]

Build = Callable[[LayerSpec], tuple[Any, "AttentionMetadataBuilder[Any]"]]
"""Returns implementation and builder of the chosen backend for a layer."""

Call = Callable[[Any, AttentionLayer, Tensor, Tensor, Any, Tensor], Tensor]
"""Calls an implementation with layer, query, cache, metadata and LSE; returns the output."""


def call_forward(
    impl: Any, layer: AttentionLayer, query: Tensor, kv_cache: Tensor, metadata: Any, lse: Tensor
) -> Tensor:
    """Call `AttentionImpl.forward` for what the cache holds."""
    output: Tensor = impl.forward(layer, query, None, None, kv_cache, metadata, lse=lse)
    return output


def call_forward_mqa(
    impl: Any, layer: AttentionLayer, query: Tensor, kv_cache: Tensor, metadata: Any, lse: Tensor
) -> Tensor:
    """Call `MLAAttentionImpl.forward_mqa`."""
    output: Tensor = impl.forward_mqa(layer, query, kv_cache, metadata, lse=lse)
    return output


_COMBINES = {"ag_rs": cp_lse_ag_out_rs, "a2a": dcp_a2a_lse_reduce}


@dataclass(slots=True, kw_only=True)
class _InnerLayer:
    """What the backend reads of the layer that calls it: all heads, no sinks."""

    q_scale: float | Tensor
    k_scale: float | Tensor
    v_scale: float | Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DcpStep:
    """One step of a rank.

    Attributes:
        num_tokens: query rows that belong to requests, the same on all ranks.
        query_lens: (B,) on the host.
        parts: ordinary batches, each with what the backend's builder made of it.
        lse_shift: (T,) float32 in tokens: what ALiBi adds to each row's LSE, per slope; None
            without.
    """

    num_tokens: int
    query_lens: Tensor
    parts: tuple[tuple[ShardPart, Any], ...]
    lse_shift: Tensor | None


@dataclass(slots=True, kw_only=True, eq=False)
class DcpLayer:
    """One rank's side of a layer whose cache is sharded.

    Attributes:
        spec: of the layer, with this rank's heads and its place in the group.
        place: the group, and how its cache is laid out.
        build: makes the backend's objects.
        can_tile: the backend serves rows without a causal mask.
        is_checked: compare the ranks' batches at every step.
        sinks, alibi_slopes: (Hq,) float32 of this rank's heads, or None.
        call: how the implementation is called.
    """

    spec: LayerSpec
    place: ContextParallel
    build: Build
    can_tile: bool
    is_checked: bool
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    call: Call
    inner: _InnerLayer = field(init=False)
    shard: Shard = field(init=False)
    _combine: Callable[..., tuple[Tensor, Tensor]] = field(init=False)
    _group: Any = field(init=False)
    _built: dict[int | None, tuple[AttentionImplBase[Any], AttentionMetadataBuilder[Any]]] = field(
        init=False, default_factory=dict
    )
    _was_compared: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be sharded, and agree with the other ranks.

        Raises:
            InvalidRequestError: interleave and block size, or interleave and ALiBi, do not fit.
            UnsupportedOptionError: the backend returns no LSE.
            RanksDisagreeError: another rank built another layer.
        """
        cache = self.spec.kv_cache_spec
        if cache is None or isinstance(self.place.dcp_group, NoGroup):
            raise InvalidRequestError.for_field("dcp_size", self.place.dcp_size, "1 without cache")
        self._group = self.place.dcp_group
        self.shard = Shard(
            world_size=self.place.dcp_size,
            rank=self.place.dcp_rank,
            interleave=self.place.interleave,
            block_size=cache.block_size,
        )
        self._check_interleave()
        name = self.place.combine_for(batch_invariant=self.spec.batch_invariant)
        self._combine = _COMBINES[name]
        impl, _ = self.built(None)
        if not impl.can_return_lse:
            raise UnsupportedOptionError(
                f"{type(impl).__name__} returns no LSE, and dcp_size={self.shard.world_size} "
                "combines partial results by theirs.",
                hint="select with needs_lse=True.",
            )
        self._compare_layers(name, impl)
        self._gather_options()

    def _check_interleave(self) -> None:
        interleave, size = self.shard.interleave, self.shard.block_size
        if size % interleave:
            raise InvalidRequestError.for_field(
                "interleave", interleave, f"a divisor of block_size={size}"
            )
        if self.spec.has_alibi and interleave != 1:
            raise InvalidRequestError.for_field(
                "interleave",
                interleave,
                "1 with ALiBi, whose bias is linear in a rank's own distances only then",
            )

    def _compare_layers(self, combine: str, impl: AttentionImplBase[Any]) -> None:
        spec = self.spec
        names = ("num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype", "scale")
        options = ("window", "softcap", "has_sinks", "has_alibi", "batch_invariant")
        places = ("dcp_size", "pcp_size", "pcp_rank")
        facts = {name: getattr(spec, name) for name in (*names, *options, *places)}
        cache = spec.kv_cache_spec
        facts |= {
            "kv_cache_dtype": getattr(cache, "kv_cache_dtype", None),
            # fp8 e4m3 has two flavours, and what one rank stored another must read.
            "cache_dtype": str(getattr(cache, "dtype", None)),
            "block_size": self.shard.block_size,
            "interleave": self.shard.interleave,
            "combine": combine,
            "checked": self.is_checked,
            # Others may run another backend, but not one whose LSE has another base.
            "lse_base_on_e": impl.lse_base_on_e,
        }
        compare_ranks(self._group, "the layer", facts)

    def _gather_options(self) -> None:
        """Collect the sinks and slopes of all heads."""
        every = gather_objects(self._group, (_numbers(self.sinks), _numbers(self.alibi_slopes)))
        sinks, slopes = (
            _by_rank([each[index] for each in every], own)
            for index, own in enumerate((self.sinks, self.alibi_slopes))
        )
        self.sinks = None if sinks is None else sinks.flatten()
        inner_slopes = None
        if slopes is not None:
            self.alibi_slopes = self._to_groups(slopes.unsqueeze(1)).squeeze(0)
            inner_slopes = self.alibi_slopes * self.shard.world_size
        self.inner = _InnerLayer(q_scale=1.0, k_scale=1.0, v_scale=1.0, alibi_slopes=inner_slopes)

    def built(
        self, window: int | None
    ) -> tuple[AttentionImplBase[Any], AttentionMetadataBuilder[Any]]:
        """Return the backend's objects for a window of so many keys of this rank's."""
        if window not in self._built:
            spec = replace(
                self.spec,
                num_heads=self.spec.num_heads * self.shard.world_size,
                window=(None, None) if window is None else (window - 1, 0),
                has_sinks=False,
                pcp_rank=0,
                pcp_size=1,
            )
            self._built[window] = self.build(spec)
        return self._built[window]

    def plan(self, common: CommonAttentionMetadata) -> DcpStep:
        """Prepare one step.

        Raises:
            MetadataError: the batch's own shares are not those of this rank.
            RanksDisagreeError: another rank has another batch; looked at in the first step and, in
                checked mode, in every one.
        """
        self.check_batch(common)
        planned = [
            (part, self.built(part.window)[1].build(0, part.common)) for part in self._parts(common)
        ]
        return self._step(common, planned)

    def check_batch(self, common: CommonAttentionMetadata) -> None:
        """Refuse shares that are not this rank's, and a batch that others have not; see `plan`."""
        self._check_shares(common)
        if self.is_checked or not self._was_compared:
            self._compare_batches(common)

    def plan_for_capture(self, common: CommonAttentionMetadata) -> DcpStep:
        """Prepare a step whose tensors stay where they are, for `refresh`.

        Its parts follow from the query lengths alone: to the host, lengths of sequences are not
        known.
        """
        common = _without_host_lengths(common)
        self._compare_batches(common)
        planned = [
            (part, self.built(part.window)[1].build_for_cudagraph_capture(part.common))
            for part in self._parts(common)
        ]
        return self._step(common, planned)

    def refresh(self, step: DcpStep, common: CommonAttentionMetadata) -> None:
        """Bring another batch of the same query lengths to the addresses of a captured step."""
        common = _without_host_lengths(common)
        self._refuse_other_rows(step, common)
        for (part, _), new in zip(step.parts, self._parts(common), strict=True):
            _move(new.common, part.common)
            self.built(part.window)[1].build(0, part.common)
        if step.lse_shift is not None:
            step.lse_shift.copy_(self._lse_shift(common))

    def _refuse_other_rows(self, step: DcpStep, common: CommonAttentionMetadata) -> None:
        lens = common.query_lens_cpu
        if not torch.equal(lens, step.query_lens):
            raise MetadataError.for_argument(
                "query lengths", lens.tolist(), f"{step.query_lens.tolist()}, those captured"
            )

    def _parts(self, common: CommonAttentionMetadata) -> list[ShardPart]:
        return shard_parts(
            common,
            self.shard,
            left=self.spec.window[0],
            may_tile=self.can_tile and not self.spec.has_alibi,
        )

    def _step(self, common: CommonAttentionMetadata, parts: list[tuple[ShardPart, Any]]) -> DcpStep:
        return DcpStep(
            num_tokens=common.num_actual_tokens,
            query_lens=common.query_lens_cpu,
            parts=tuple(parts),
            lse_shift=self._lse_shift(common) if self.spec.has_alibi else None,
        )

    def _check_shares(self, common: CommonAttentionMetadata) -> None:
        local, lens = common.dcp_local_seq_lens_cpu, common.seq_lens_cpu
        if local is None or lens is None or not common.seq_lens_cpu_is_exact:
            return
        own = self.shard.count(lens)
        if bool((local < own).any()):
            request = int((local < own).int().argmax())
            raise MetadataError.for_argument(
                f"dcp_local_seq_lens_cpu[{request}]",
                int(local[request]),
                f"{int(own[request])}, what rank {self.shard.rank} holds of "
                f"{int(lens[request])} tokens",
            )

    def _compare_batches(self, common: CommonAttentionMetadata) -> None:
        lens = common.seq_lens_cpu if common.seq_lens_cpu_is_exact else None
        facts = {"query_start_loc": common.query_start_loc_cpu, "seq_lens": lens}
        compare_ranks(self._group, "the batch", facts)
        self._was_compared = True

    def _lse_shift(self, common: CommonAttentionMetadata) -> Tensor:
        """Return (T,): how much nearer each row's last own key looks than it is, in tokens.

        A row at p sees own keys 0 to n - 1, key m at position m * W + rank. Its distance
        p - rank - m * W exceeds the backend's, (n - 1 - m) * W, by p - rank - (n - 1) * W.
        """
        shard, lens = self.shard, common.query_lens_cpu.long()
        device = common.query_start_loc.device
        request = torch.repeat_interleave(torch.arange(len(lens)), lens)
        back = common.query_start_loc_cpu[1:].long()[request] - torch.arange(len(request))
        position = common.seq_lens[request.to(device)] - back.to(device)
        own = local_seq_lens((position + 1).clamp_min(0), shard.world_size, shard.rank)
        return (position - shard.rank - (own - 1) * shard.world_size).float()

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        step: DcpStep,
        output: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Gather, attend to this rank's keys, combine.

        Args:
            layer: what carries the cache's scales.
            query: (T or more, Hq, D), this rank's heads.
            kv_cache: this rank's.
            step: from `plan`.
            output: (T or more, Hq, Dv), written in place.
            lse: (Hq, T or more) float32, written in place.

        Returns:
            (T or more, Hq, Dv).
        """
        rows = slice(0, step.num_tokens)
        if output is None:
            output = query.new_zeros(len(query), self.spec.num_heads, self.spec.head_size_v)
        if step.num_tokens == 0:
            return output
        self.inner.k_scale, self.inner.v_scale = layer.k_scale, layer.v_scale
        partial, sums = self._attend(self._gathered(query[rows]), kv_cache, step)
        if step.lse_shift is not None and self.alibi_slopes is not None:
            sums = sums - self.alibi_slopes.unsqueeze(1) * step.lse_shift
        merged, total = self._combine(
            self._to_ranks(partial, head=1),
            self._to_ranks(sums, head=0),
            self._group,
            sinks=self.sinks,
        )
        output[rows].copy_(merged)
        if lse is not None:
            lse[:, rows].copy_(total)
        return output

    def write(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        """Store the keys and values of this rank's share; see `AttentionImpl`."""
        self.inner.k_scale, self.inner.v_scale = layer.k_scale, layer.v_scale
        impl: Any = self.built(None)[0]
        impl.do_kv_cache_update(self.inner, key, value, kv_cache, slots)

    def _gathered(self, query: Tensor) -> Tensor:
        """Return (T, W * Hq, D): the queries of all ranks, those of one kv head together."""
        own = query.contiguous()
        every = own.new_empty((self.shard.world_size * len(own), *own.shape[1:]))
        single_collective("all_gather_single", "all_gather_into_tensor")(
            every, own, group=self._group
        )
        return self._to_groups(every.view(self.shard.world_size, *own.shape))

    def _to_groups(self, by_rank: Tensor) -> Tensor:
        """Turn (W, T, Hq, ...) or (W, 1, Hq) into (T, W * Hq, ...), by kv head, then by rank."""
        kv_heads = self.spec.num_kv_heads
        split = by_rank.unflatten(2, (kv_heads, -1))  # (W, T, Hkv, G, ...)
        grouped: Tensor = split.movedim(0, 2).flatten(1, 3)
        return grouped.contiguous()

    def _to_ranks(self, by_group: Tensor, *, head: int) -> Tensor:
        """Undo that order of heads along one dimension, so that each rank's lie together."""
        kv_heads = self.spec.num_kv_heads
        if kv_heads == 1:
            return by_group
        split = by_group.unflatten(head, (kv_heads, self.shard.world_size, -1))
        by_rank: Tensor = split.movedim(head + 1, head).flatten(head, head + 2)
        return by_rank

    def _attend(self, query: Tensor, kv_cache: Tensor, step: DcpStep) -> tuple[Tensor, Tensor]:
        """Return this rank's partial output (T, W * Hq, Dv) and natural LSE (W * Hq, T)."""
        if len(step.parts) == 1 and step.parts[0][0].rows is None:
            return self._run(query, kv_cache, *step.parts[0])
        partial = query.new_zeros(*query.shape[:2], self.spec.head_size_v)
        sums = query.new_full((query.shape[1], len(query)), -torch.inf, dtype=torch.float32)
        for part, metadata in step.parts:
            if part.rows is None:
                partial, sums = merge_attn_states(
                    partial, sums, *self._run(query, kv_cache, part, metadata)
                )
                continue
            found = self._run(query[part.rows], kv_cache, part, metadata)
            earlier = partial[part.rows], sums[:, part.rows]
            partial[part.rows], sums[:, part.rows] = merge_attn_states(*earlier, *found)
        return partial, sums

    def _run(
        self, query: Tensor, kv_cache: Tensor, part: ShardPart, metadata: Any
    ) -> tuple[Tensor, Tensor]:
        impl, _ = self.built(part.window)
        sums = query.new_full((query.shape[1], len(query)), -torch.inf, dtype=torch.float32)
        result = self.call(impl, self.inner, query, kv_cache, metadata, sums)
        return result, to_natural(sums, lse_base_on_e=impl.lse_base_on_e)


def _without_host_lengths(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    return common.with_fields(seq_lens_cpu=None, dcp_local_seq_lens_cpu=None)


def _move(source: CommonAttentionMetadata, target: CommonAttentionMetadata) -> None:
    """Copy lengths and table to where a captured step reads them."""
    target.seq_lens.copy_(source.seq_lens)
    theirs, ours = source.block_table, target.block_table
    if theirs is None or ours is None or theirs is ours:
        return
    if theirs.shape != ours.shape:
        raise MetadataError.for_argument(
            "block_table shape", tuple(theirs.shape), f"{tuple(ours.shape)}, as captured"
        )
    ours.copy_(theirs)


def _numbers(values: Tensor | None) -> list[float] | None:
    return None if values is None else values.tolist()


def _by_rank(values: list[list[float] | None], own: Tensor | None) -> Tensor | None:
    """Return (W, Hq) float32 where the own values are."""
    if own is None:
        return None
    return torch.tensor(values, dtype=torch.float32, device=own.device)
