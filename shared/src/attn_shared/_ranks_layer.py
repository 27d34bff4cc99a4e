"""A layer whose sequences several ranks share: what `Attention` does beside calling its backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attn_shared._dcp_batch import Shard
from attn_shared._dcp_layer import Build, Call, DcpLayer, DcpStep, call_forward
from attn_shared._pcp_layer import PcpGroup
from attn_shared.capability import Capability, Support
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError, MetadataError, UnsupportedOptionError
from attn_shared.impl import AttentionLayer
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ordering import ordered
from attn_shared.prefill_split import PrefillSplit
from attn_shared.ranks import ContextParallel
from attn_shared.request import AttentionRequest
from attn_shared.spec import LayerSpec

if TYPE_CHECKING:
    from attn_shared.backend import AttentionMetadataBuilder

__all__ = ["RanksLayer", "RanksStep", "require_ranks_step"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RanksStep:
    """One step of one rank.

    Attributes:
        whole: the batch as it was described.
        common: the part of it whose rows this rank computes.
        split: how the ranks split the tokens; None: each has them all.
        sharded: the step over a sharded cache, or None.
        metadata: the backend's own, where the cache is whole.
        token_order: (T_r,) int64: the order of rows that the backend needs, or None.
        gathered: prefills over latents, behind the rows of `common`: `MLAMetadata`, or None.
    """

    whole: CommonAttentionMetadata
    common: CommonAttentionMetadata
    split: PrefillSplit | None
    sharded: DcpStep | None
    metadata: Any
    token_order: Tensor | None
    gathered: Any = None


def require_ranks_step(metadata: object) -> RanksStep:
    """Return the step of a layer over ranks, after refusing a plan of a layer on one rank.

    Raises:
        InvalidInputError: as said.
    """
    if not isinstance(metadata, RanksStep):
        raise InvalidInputError.for_argument(
            "plan", "of a layer on one rank", "from this layer's own `plan`"
        )
    return metadata


@dataclass(slots=True, kw_only=True, eq=False)
class RanksLayer:
    """One rank's side of a layer.

    Attributes:
        layer: what carries scales, sinks and slopes.
        request: of the layer.
        spec: of the layer.
        place: its groups.
        build: makes the backend's objects.
        capability: of the backend.
        device: where it runs.
        is_checked: compare the ranks' batches at every step.
        call: how an implementation over a sharded cache is called.
    """

    layer: AttentionLayer
    request: AttentionRequest
    spec: LayerSpec
    place: ContextParallel
    build: Build
    capability: Capability
    device: DeviceFacts
    is_checked: bool
    call: Call = call_forward
    impl: Any = field(init=False)
    builder: AttentionMetadataBuilder[Any] = field(init=False)
    _dcp: DcpLayer | None = field(init=False, default=None)
    _pcp: PcpGroup | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Build the backend's objects, and agree with the other ranks."""
        if self.request.dcp_size > 1:
            self._dcp = self._shard()
            self.impl, self.builder = self._dcp.built(None)
        else:
            self.impl, self.builder = self.build(self.spec)
        if self.request.pcp_size > 1:
            self._pcp = self._join()

    def _shard(self) -> DcpLayer:
        return DcpLayer(
            spec=self.spec,
            place=self.place,
            build=self.build,
            can_tile=self.capability.non_causal is not Support.NO,
            is_checked=self.is_checked,
            sinks=self.layer.sinks,
            alibi_slopes=self.layer.alibi_slopes,
            call=self.call,
        )

    def _join(self) -> PcpGroup:
        if not self.impl.supports_pcp:
            raise UnsupportedOptionError(
                f"{type(self.impl).__name__} does not declare supports_pcp, and "
                f"pcp_size={self.request.pcp_size} splits the tokens over ranks."
            )
        names = ("num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype", "dcp_size")
        facts = {name: getattr(self.spec, name) for name in (*names, "dcp_rank")}
        return PcpGroup(place=self.place, facts=facts, is_checked=self.is_checked)

    def with_shares(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch with this rank's share of each sequence, where it has none yet."""
        if self._dcp is None or common.dcp_local_seq_lens is not None:
            return common
        count, on_host = self._dcp.shard.count, common.seq_lens_cpu
        return common.with_fields(
            dcp_local_seq_lens=count(common.seq_lens),
            dcp_local_seq_lens_cpu=None if on_host is None else count(on_host),
        )

    def plan(self, common: CommonAttentionMetadata) -> RanksStep:
        """Prepare one step.

        Raises:
            MetadataError: the batch does not describe what this rank holds.
            UnsupportedOptionError: the batch asks what the backend, or sharding, does not serve.
            RanksDisagreeError: another rank has another batch; looked at in the first step and, in
                checked mode, in every one.
        """
        self._refuse_unserved(common)
        split = None if self._pcp is None else self._pcp.split(common)
        own = common if split is None else split.common
        sharded, metadata, order = None, None, None
        if self._dcp is not None:
            sharded = self._dcp.plan(own)
        else:
            batch = own
            if self.builder.requires_ordered_batch:
                batch, order = ordered(own, self.builder.reorder_batch_threshold or 1)
            metadata = self.builder.build(0, batch)
        return RanksStep(
            whole=common,
            common=own,
            split=split,
            sharded=sharded,
            metadata=metadata,
            token_order=order,
        )

    def check_batch(self, common: CommonAttentionMetadata) -> None:
        """Refuse a batch that is not served, or that another rank has not; see `plan`."""
        self._refuse_unserved(common)
        if self._dcp is not None:
            self._dcp.check_batch(common)

    @property
    def shard(self) -> Shard:
        """What this rank holds of each sequence.

        Raises:
            TypeError: the cache is not sharded.
        """
        if self._dcp is None:
            raise TypeError("this layer's cache is whole on every rank")
        return self._dcp.shard

    @property
    def built(self) -> tuple[Any, AttentionMetadataBuilder[Any]]:
        """The backend's implementation and builder."""
        return self.impl, self.builder

    @property
    def group(self) -> Any:
        """The ranks that share the cache."""
        return self.place.dcp_group

    def plan_for_capture(self, common: CommonAttentionMetadata) -> RanksStep:
        """Prepare a step whose tensors stay where they are.

        Raises:
            UnsupportedOptionError: ranks split the tokens, so that rows move from step to step.
        """
        self._refuse_unserved(common)
        if self._dcp is None or self._pcp is not None:
            raise UnsupportedOptionError(
                f"pcp_size={self.request.pcp_size} splits the tokens over ranks; a captured step "
                "has pcp_size=1."
            )
        return RanksStep(
            whole=common,
            common=common,
            split=None,
            sharded=self._dcp.plan_for_capture(common),
            metadata=None,
            token_order=None,
        )

    def refresh(self, step: RanksStep, common: CommonAttentionMetadata) -> None:
        """Bring another batch of the same query lengths to the addresses of a captured step.

        Raises:
            MetadataError: it has other query lengths, longer sequences, another table's width, or
                no slots.
        """
        if self._dcp is None or step.sharded is None:
            raise MetadataError.for_argument("plan", "of no sharded layer", "one for capture")
        if common.max_seq_len > step.whole.max_seq_len:
            raise MetadataError.for_argument(
                "max_seq_len", common.max_seq_len, f"at most {step.whole.max_seq_len}, as captured"
            )
        ours, theirs = step.whole.slot_mapping, common.slot_mapping
        self._dcp.refresh(step.sharded, common)
        if ours is None or ours is theirs:
            return
        if theirs is None or theirs.shape != ours.shape:
            raise MetadataError.for_argument(
                "slot_mapping",
                None if theirs is None else f"of shape {tuple(theirs.shape)}",
                f"{tuple(ours.shape)}, as captured",
            )
        ours.copy_(theirs)

    def _refuse_unserved(self, common: CommonAttentionMetadata) -> None:
        """Ask the capability again, with the options of this step.

        The backend's builder does not: it sees this rank's share, which has none of them.
        """
        if common.causal is True and not common.mm_prefix_ranges:
            return
        request = self.request.with_options(
            non_causal=common.causal is False,
            per_request_causal=isinstance(common.causal, Tensor),
            use_mm_prefix=any(common.mm_prefix_ranges.values()),
        )
        reasons = self.capability.check(request, self.device)
        if reasons:
            raise UnsupportedOptionError(
                f"this batch is not served: {'; '.join(map(str, reasons))}.",
                hint="say it in the request (non_causal, per_request_causal, use_mm_prefix), and "
                "selection finds who does, or says why nobody can.",
            )

    def write(self, key: Tensor, value: Tensor, kv_cache: Tensor, step: RanksStep) -> None:
        """Store the step's keys and values: this rank's share of each rank's tokens.

        Args:
            key: (T_r, Hkv, D), of the rows that this rank computes.
            value: (T_r, Hkv, Dv).
            kv_cache: this rank's.
            step: from `plan`.

        Raises:
            InvalidInputError: the batch has no slots, or the rows do not fit.
        """
        slots = step.whole.slot_mapping
        if slots is None:
            raise InvalidInputError.for_argument("slot_mapping", None, "(T,) int64 where key is")
        if self._pcp is not None and step.split is not None:
            key, value = self._pcp.gather(key, value, step.split)
            slots = slots[: step.whole.num_actual_tokens]
        if not len(slots):
            return
        own = key[: len(slots)], value[: len(slots)]
        if self._dcp is None:
            self.impl.do_kv_cache_update(self.layer, *own, kv_cache, slots)
        else:
            self._dcp.write(self.layer, *own, kv_cache, slots)

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        step: RanksStep,
        output: Tensor | None,
        lse: Tensor | None,
    ) -> Tensor:
        """Attend with this rank's rows (T_r, Hq, D), and return (T_r, Hq, Dv)."""
        if self._dcp is not None and step.sharded is not None:
            return self._dcp.forward(self.layer, query, kv_cache, step.sharded, output, lse)
        if output is None:
            output = query.new_zeros(len(query), self.spec.num_heads, self.spec.head_size_v)
        rows: slice | Tensor = slice(0, step.common.num_actual_tokens)
        if step.common.num_actual_tokens == 0:
            return output
        if step.token_order is not None:
            rows = step.token_order
        sums = None
        if lse is not None:
            sums = lse.new_empty(lse.shape[0], step.common.num_actual_tokens)
        output[rows] = self.impl.forward(
            self.layer, query[rows], None, None, kv_cache, step.metadata, lse=sums
        )
        if lse is not None and sums is not None:
            lse[:, rows] = sums
        return output
