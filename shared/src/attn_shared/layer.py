"""Attention for a user with no engine: select, allocate, plan, forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attn_shared._dcp_layer import Build
from attn_shared._fields import require_positive
from attn_shared._handles import register_layer
from attn_shared._layer_inputs import (
    blocks_bound,
    check_batch_kind,
    check_cache_size,
    check_config,
    check_lengths,
    check_options,
    check_places,
    device_of,
    group_sizes,
    per_head,
    policy_of,
)
from attn_shared._ranks_layer import RanksLayer, require_ranks_step
from attn_shared.backend import AttentionImpl, AttentionImplBase, AttentionMetadataBuilder
from attn_shared.call_checks import CallChecker
from attn_shared.checked import check_metadata
from attn_shared.device import DeviceFacts
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnsupportedOptionError
from attn_shared.gradients import OwnScales, refuse_gradients
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec, MLAAttentionSpec, spec_for
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ordering import ordered
from attn_shared.ranks import ContextParallel
from attn_shared.request import AttentionRequest
from attn_shared.selection import Policy, Selection
from attn_shared.selector import DEFAULT_SELECTOR, Selector
from attn_shared.spec import BuildConfig, LayerSpec
from attn_shared.tensor_checks import check_block_size, check_scale

__all__ = ["Attention", "StepPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step's calls share: the batch, and what the backend made of it.

    Attributes:
        common: the batch, in the order that the backend needs.
        metadata: the backend's own.
        token_order: (T,) int64: row i of that order is row token_order[i] of the caller's query;
            None where the two are the same.
        blocks_bound: a cache of so many blocks has all of this batch, where the host may look: in
            checked mode, and on a CPU.
        rows: (T_r,) int64: which rows of the batch this rank computes, where ranks split its tokens
            (`common` then describes those alone); None: all.
    """

    common: CommonAttentionMetadata
    metadata: Any
    token_order: torch.Tensor | None = None
    blocks_bound: int | None = None
    rows: torch.Tensor | None = None


class Attention(OwnScales):
    """One attention layer over a paged cache.

        attn = Attention(num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        kv_cache = attn.allocate(num_blocks=1024)
        plan = attn.plan(CommonAttentionMetadata.from_lengths(...))
        output = attn.forward(query, key, value, kv_cache, plan)

    Attributes:
        selection: which backend runs it, and why.
        request: what was asked.
        spec: the layer's description.
        kv_cache_spec: the cache's format, None for cache-free attention.
        q_scale, k_scale, v_scale: scales of a quantised cache.
        sinks: (Hq,) float32, or None.
        alibi_slopes: (Hq,) float32, or None.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_size: int,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        backend: str | Policy | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        k_scale: float | torch.Tensor = 1.0,
        v_scale: float | torch.Tensor = 1.0,
        config: BuildConfig | None = None,
        context_parallel: ContextParallel | None = None,
        selector: Selector = DEFAULT_SELECTOR,
        **options: Any,
    ) -> None:
        """Select a backend for the layer and build it.

        Args:
            num_heads: query heads (Hq).
            head_size: width of query and key heads (D).
            num_kv_heads: kv heads (Hkv); None: as many as query heads.
            scale: factor on q.k; None: 1 / sqrt(head_size).
            dtype: dtype of query, key, value and output.
            device: torch device to run on.
            backend: name of the backend to use; None or "auto" lets the selector choose; a `Policy`
                also says who named it.
            sinks: (Hq,) one extra logit per head.
            alibi_slopes: (Hq,) slope per head.
            k_scale: scale of stored keys; a number, or (Hkv,).
            v_scale: scale of stored values.
            config: bounds of the batches; `checked` validates each batch's contents.
            context_parallel: the ranks that share the layer's sequences; all of them build the
                same layer, which takes two small collectives.
            selector: who selects.
            options: further fields of `AttentionRequest` (window, softcap, kv_cache_dtype,
                block_size, attn_type, needs_lse, ...).

        Raises:
            RanksDisagreeError: another rank built another layer.
            InvalidInputError: sinks, slopes or scales that do not fit the heads.
            InvalidRequestError: a field that no backend may accept.
            UnknownNameError: an option or a backend of no such name.
            NoBackendError: nothing serves the layer; the message has every reason.
        """
        check_options(options, _ARGUMENTS)
        policy = policy_of(backend)
        self.device = device_of(device)
        self.config = check_config(config)
        place, sizes = group_sizes(context_parallel, options)
        request = AttentionRequest(
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            has_sinks=sinks is not None,
            has_alibi=alibi_slopes is not None,
            **{**options, **sizes},
        )
        facts = selector.device_facts(self.device)
        self.selection = selector.resolve(request, facts, policy)
        self.request = request
        check_scale("k_scale", k_scale, request.num_kv_heads)
        check_scale("v_scale", v_scale, request.num_kv_heads)
        self.q_scale: float | torch.Tensor = 1.0
        self.k_scale, self.v_scale = k_scale, v_scale
        self.sinks = per_head("sinks", sinks, num_heads, self.device)
        self.alibi_slopes = per_head("alibi_slopes", alibi_slopes, num_heads, self.device)
        self.kv_cache_spec = _cache_spec(self.selection, facts)
        self.spec = self._described(scale, place)
        build = partial(_build, self.selection, self.config, self.device)
        self._ranks = self._shared(place, build, facts, selector)
        self.impl, self.builder = self._made(build)
        self._checker = CallChecker(self.spec, returns_lse=self.impl.can_return_lse)
        self._writes_cache = not self.selection.backend_cls.forward_includes_kv_cache_update
        self._has_one_call = self._writes_cache and self._ranks is None and self.impl.has_one_call()
        self.handle = register_layer(self)

    def _described(self, scale: float | None, place: ContextParallel) -> LayerSpec:
        return LayerSpec.from_request(
            self.request,
            scale=self.request.head_size**-0.5 if scale is None else scale,
            kv_cache_spec=self.kv_cache_spec,
            dcp_rank=place.dcp_rank,
            dcp_interleave=place.interleave,
            pcp_rank=place.pcp_rank,
        )

    def _made(self, build: Build) -> tuple[AttentionImpl[Any], AttentionMetadataBuilder[Any]]:
        if self._ranks is not None:
            return self._ranks.impl, self._ranks.builder
        return build(self.spec)

    def _shared(
        self, place: ContextParallel, build: Build, facts: DeviceFacts, selector: Selector
    ) -> RanksLayer | None:
        """Return what runs the layer over its ranks; None where it has one."""
        if not place.is_shared:
            return None
        return RanksLayer(
            layer=self,
            request=self.request,
            spec=self.spec,
            place=place,
            build=build,
            capability=self.selection.backend_cls.capability(facts, selector.inventory(facts)),
            device=facts,
            is_checked=self.config.checked,
        )

    def allocate(self, num_blocks: int) -> torch.Tensor:
        """Return a zero-filled cache of `num_blocks` blocks.

        Raises:
            UnsupportedOptionError: the layer is cache-free.
        """
        if not isinstance(self.kv_cache_spec, AttentionSpec | MLAAttentionSpec):
            raise UnsupportedOptionError(f"attn_type={self.request.attn_type} needs no cache.")
        return self.kv_cache_spec.allocate(num_blocks, self.device)

    def plan(self, common: CommonAttentionMetadata, *, num_blocks: int | None = None) -> StepPlan:
        """Prepare one step; the plan serves every layer that was built alike.

        A batch in another order than the backend needs is reordered here, and `forward` puts the
        output back in the caller's order.

        Args:
            common: the batch.
            num_blocks: in checked mode, blocks of the cache, which bound slots and block ids.

        Raises:
            MetadataError: the batch contradicts itself (contents are looked at in checked mode
                only, since that synchronises the device; on a CPU, negative block ids always), was
                described for blocks of another size than the layer's cache has, or has fields
                that a layer of this attn_type does not read.
            InvalidRequestError: `num_blocks` is no count.
            RanksDisagreeError: ranks that share the sequences describe other batches.
        """
        check_batch_kind(common, self.request)
        if num_blocks is not None:
            require_positive("num_blocks", num_blocks)
        check_block_size(common.block_size, self.kv_cache_spec)
        if self._ranks is not None:
            common = self._ranks.with_shares(common)
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec, num_blocks=num_blocks)
        bound = blocks_bound(common, self.kv_cache_spec, is_checked=self.config.checked)
        if self._ranks is not None:
            step = self._ranks.plan(common)
            return StepPlan(
                common=step.common,
                metadata=step,
                blocks_bound=bound,
                rows=None if step.split is None else step.split.rows,
            )
        token_order = None
        if self.builder.requires_ordered_batch:
            common, token_order = ordered(common, self.builder.reorder_batch_threshold or 1)
        metadata = self.builder.build(0, common)
        return StepPlan(
            common=common, metadata=metadata, token_order=token_order, blocks_bound=bound
        )

    def plan_for_capture(self, common: CommonAttentionMetadata) -> StepPlan:
        """Prepare one step for a graph to capture; `refresh` brings later batches to it.

        Args:
            common: a batch as large as any that is to be replayed.
        """
        check_batch_kind(common, self.request)
        check_block_size(common.block_size, self.kv_cache_spec)
        if self._ranks is not None:
            return StepPlan(common=common, metadata=self._ranks.plan_for_capture(common))
        metadata = self.builder.build_for_cudagraph_capture(common)
        return StepPlan(common=common, metadata=metadata)

    def refresh(self, plan: StepPlan, common: CommonAttentionMetadata) -> None:
        """Bring a batch of the same shape to a captured step.

        Args:
            plan: from `plan_for_capture`.
            common: the batch; where no ranks share the cache, at the addresses of the captured one
                (`attn_shared.static_batch`).
        """
        if self._ranks is not None:
            self._ranks.refresh(plan.metadata, common)
        else:
            self.builder.build(0, common)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        plan: StepPlan,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values to the cache, and attend.

        Args:
            query: (T, Hq, D).
            key: (T, Hkv, D), or None to read the cache only.
            value: (T, Hkv, Dv), or None.
            kv_cache: from `allocate`; None for cache-free attention.
            plan: from `plan`.
            output: (T, Hq, Dv), written in place; None returns the kernel's own tensor.
            lse: (Hq, T) float32, written in place.

        Returns:
            (T, Hq, Dv).

        Raises:
            InvalidInputError: an argument does not fit the layer, or the plan is not of its backend
                and options; nothing was written.
            UnsupportedOptionError: a gradient is asked for; nothing was written.
        """
        if not isinstance(plan, StepPlan):
            raise InvalidInputError.for_argument(
                "plan", f"a {type(plan).__name__}", "a StepPlan, which `plan` returns"
            )
        check_block_size(plan.common.block_size, self.kv_cache_spec)
        refuse_gradients(self, query=query, key=key, value=value, kv_cache=kv_cache, output=output)
        if self._has_one_call and lse is None:
            result = self._forward_in_one(query, key, value, kv_cache, plan, output)
            if result is not None:
                return result
        check_places(key, value, kv_cache, output, lse)
        if self._ranks is not None:
            return self._forward_shared(query, key, value, kv_cache, plan, output, lse)
        self._require_slots(key, value, plan.common)
        check_cache_size(kv_cache, plan.blocks_bound, plan.common, self.kv_cache_spec)
        if plan.token_order is not None:
            self._checker.check_tensors(query, output, lse, plan.common.num_actual_tokens)
            return self._forward_reordered(query, key, value, kv_cache, plan, output, lse)
        slots = plan.common.slot_mapping
        if self._writes_cache and kv_cache is not None and key is not None and slots is not None:
            # The implementation checks too, but when the cache is already changed.
            self.impl.check_metadata(plan.metadata)
            self._checker.check_tensors(query, output, lse, plan.common.num_actual_tokens)
            if value is None:
                raise InvalidInputError.for_argument("value", None, "a tensor where key is one")
            self.impl.do_kv_cache_update(self, key, value, kv_cache, slots)
        return self.impl.forward(self, query, key, value, kv_cache, plan.metadata, output, lse=lse)

    def _forward_in_one(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        plan: StepPlan,
        output: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Write and attend by one call, which checks all; None, and nothing written, where not."""
        slots = plan.common.slot_mapping
        if key is None or value is None or kv_cache is None or slots is None:
            return None
        if plan.token_order is not None:
            return None
        states = query, key, value, kv_cache
        return self.impl.write_and_attend(self, *states, slots, plan.metadata, output)

    def _require_slots(
        self,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        common: CommonAttentionMetadata,
    ) -> None:
        """Refuse keys and values that would be stored nowhere."""
        is_writer = self.kv_cache_spec is not None and self.spec.kv_sharing_target is None
        if is_writer and key is not None and common.slot_mapping is None:
            raise InvalidInputError.for_argument(
                "key",
                "a tensor",
                "None with a batch that has no slot_mapping, for it would be stored nowhere",
                hint="describe the batch with block_size or slot_mapping, or pass key=None and "
                "value=None to read the cache only.",
            )
        if key is None and value is not None:
            raise InvalidInputError.for_argument("value", "a tensor", "None where key is None")

    def _forward_shared(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        plan: StepPlan,
        output: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run this rank's part of a step; everything is checked before it meets the others."""
        step, ranks = require_ranks_step(plan.metadata), self._ranks
        if ranks is None:
            raise TypeError("a layer on one rank has no step over several")
        check_cache_size(kv_cache, plan.blocks_bound, step.whole, self.kv_cache_spec)
        self._checker.check_tensors(query, output, lse, plan.common.num_actual_tokens)
        cache, spec = self._checker.check_cache(kv_cache, query.device)
        spec.split(cache)
        self._checker.check_written_keys(key, value, query.device)
        self._require_slots(key, value, step.whole)
        if key is not None and value is not None and self.spec.kv_sharing_target is None:
            ranks.write(key, value, cache, step)
        return ranks.attend(query, cache, step, output, lse)

    def _forward_reordered(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        plan: StepPlan,
        output: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the batch in the backend's order, and write the results in the caller's."""
        order = plan.token_order
        if plan.common.encoder_seq_lens is None:  # else they are the encoder's tokens
            key = None if key is None else key[order]
            value = None if value is None else value[order]
        result_lse = (
            None if lse is None else lse.new_empty(lse.shape[0], plan.common.num_actual_tokens)
        )
        result = self.forward(
            query[order],
            key,
            value,
            kv_cache,
            StepPlan(common=plan.common, metadata=plan.metadata),
            lse=result_lse,
        )
        if output is None:
            output = result.new_zeros((query.shape[0], *result.shape[1:]))
        output[order] = result
        if lse is not None and result_lse is not None:
            lse[:, order] = result_lse
        return output

    def encode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: Sequence[int],
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend without a cache: every token of a request sees all of its tokens.

        For vision towers and encoders (attn_type ENCODER or ENCODER_ONLY).

        Args:
            query: (T, Hq, D), requests one after the other.
            key: (T, Hkv, D).
            value: (T, Hkv, Dv).
            lengths: tokens of each request; they sum to T.
            output: (T, Hq, Dv), written in place.

        Raises:
            UnsupportedOptionError: the layer was built with a cache.
            InvalidInputError: the lengths are none, or do not sum to T.
        """
        if not self.request.is_cache_free:
            raise UnsupportedOptionError(
                f"encode needs attn_type ENCODER or ENCODER_ONLY, not {self.request.attn_type}.",
                hint="build the layer with attn_type=AttentionType.ENCODER_ONLY.",
            )
        check_lengths(lengths, query)
        common = CommonAttentionMetadata.from_lengths(
            query_lens=lengths, seq_lens=lengths, device=self.device, causal=False
        )
        return self.forward(query, key, value, None, self.plan(common), output)

    def __repr__(self) -> str:
        """Read as what runs where."""
        return f"Attention({self.selection.one_line()})"


def _cache_spec(selection: Selection, device: DeviceFacts) -> KVCacheSpec | None:
    if selection.request.is_cache_free or selection.block_size is None:
        return None
    return spec_for(
        selection.request,
        block_size=selection.block_size,
        layout=selection.kv_layout or KVCacheLayout.NHD,
        fp8_e4m3_dtype=device.fp8_dtype or torch.float8_e4m3fn,
    )


def _build(
    selection: Selection, config: BuildConfig, device: torch.device, spec: LayerSpec
) -> tuple[AttentionImpl[Any], AttentionMetadataBuilder[Any]]:
    """Build implementation and builder of the chosen backend."""
    backend = selection.backend_cls
    impl: AttentionImplBase[Any] = backend.get_impl_cls()(spec)
    if not isinstance(impl, AttentionImpl):
        raise InvalidRequestError.for_field(
            "mla", selection.request.mla, "None for Attention", hint="use MLAAttention."
        )
    builder = backend.get_builder_cls()(spec.kv_cache_spec, {"attention": spec}, config, device)
    return impl, builder


_ARGUMENTS = ("num_heads", "head_size", *(Attention.__init__.__kwdefaults__ or ()))
