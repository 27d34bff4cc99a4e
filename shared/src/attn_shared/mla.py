"""Multi-head latent attention for a user with no engine: select, allocate, plan, forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_shared._dcp_layer import call_forward_mqa
from attn_shared._handles import register_layer
from attn_shared._layer_inputs import (
    blocks_bound,
    check_batch_kind,
    check_cache_size,
    check_config,
    check_options,
    device_of,
    dims_of,
    group_sizes,
    policy_of,
)
from attn_shared._mla_ranks import GatheredPrefills, may_gather
from attn_shared._ranks_layer import RanksLayer, require_ranks_step
from attn_shared.backend import AttentionMetadataBuilder, MLAAttentionImpl
from attn_shared.call_checks import CallChecker
from attn_shared.checked import check_metadata
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnsupportedOptionError
from attn_shared.gradients import OwnScales, refuse_gradients
from attn_shared.kv_cache import MLAAttentionSpec, spec_for
from attn_shared.layer import StepPlan
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_prefill import prefill_request
from attn_shared.mla_projections import MLAProjections
from attn_shared.ordering import ordered
from attn_shared.ranks import ContextParallel
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.selection import Policy, Selection
from attn_shared.selector import DEFAULT_SELECTOR, Selector
from attn_shared.spec import BuildConfig, LayerSpec
from attn_shared.tensor_checks import check_block_size, check_scale

__all__ = ["MLAAttention"]


class MLAAttention(OwnScales):
    """One layer of multi-head latent attention over a cache of latents.

        attn = MLAAttention(num_heads=16, kv_b_proj=weight, scale=192**-0.5)
        kv_cache = attn.allocate(num_blocks=1024)
        plan = attn.plan(CommonAttentionMetadata.from_lengths(...))
        output = attn.forward(query, latent, rope, kv_cache, plan)

    Attributes:
        selection: which backend decodes, and why.
        prefill_selection: which kernel prefills, and why; None where the configuration brings a
            class, and over a sharded cache without `kv_b_proj`, where every row is decoded.
        request: what was asked.
        spec: the layer's description.
        kv_cache_spec: the cache's format.
        kv_b_proj: the up-projection, or None.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        scale: float,
        kv_b_proj: torch.Tensor | None = None,
        dims: MLADims | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        backend: str | Policy | None = None,
        prefill: str | Policy | None = None,
        cache_scale: float | torch.Tensor = 1.0,
        config: BuildConfig | None = None,
        context_parallel: ContextParallel | None = None,
        selector: Selector = DEFAULT_SELECTOR,
        **options: Any,
    ) -> None:
        """Select a backend for the layer and build it.

        Args:
            num_heads: query heads of this rank (H).
            scale: factor on q.k before absorption, 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)
                for DeepSeek; never assumed.
            kv_b_proj: (H * (qk_nope_head_dim + v_head_dim), kv_lora_rank), the weight by which
                latents become this rank's keys and values; it is kept, not copied. None: the
                caller projects, and `decode` alone is called.
            dims: widths; None: those of DeepSeek-V2 and V3.
            dtype: dtype of query and latent.
            device: torch device to run on.
            backend: name of the backend to use; None or "auto" lets the selector choose.
            prefill: name of what prefills, likewise.
            cache_scale: of the entries of an fp8 cache: read back = stored * scale.
            config: bounds of the batches; `checked` validates each batch's contents.
            context_parallel: the ranks among which the cache of latents is sharded, each with its
                own heads; earlier entries are then gathered for prefills.
            selector: who selects.
            options: further fields of `AttentionRequest`.

        Raises:
            InvalidInputError: the weight or the cache's scale does not fit.
            InvalidRequestError: a field that no backend may accept.
            UnknownNameError: an option, a backend or a prefill of no such name.
            NoBackendError: nothing serves the layer; the message has every reason.
            RanksDisagreeError: another rank built another layer.
        """
        check_options(options, _ARGUMENTS)
        dims = dims_of(dims, options)
        place, sizes = group_sizes(context_parallel, options)
        self.request = AttentionRequest(
            num_heads=num_heads,
            num_kv_heads=1,
            head_size=dims.latent_size,
            head_size_v=dims.kv_lora_rank,
            dtype=dtype,
            mla=dims,
            **{**options, **sizes},
        )
        self.device, self.config = device_of(device), check_config(config)
        facts = selector.device_facts(self.device)
        self.selection = selector.resolve(self.request, facts, policy_of(backend))
        self._gathers = kv_b_proj is not None and may_gather(self.request, self.selection)
        self.prefill_selection = self._selected_prefill(prefill, facts, selector)
        check_scale("cache_scale", cache_scale, 1)
        self.q_scale: float | torch.Tensor = 1.0
        self.k_scale: float | torch.Tensor = cache_scale
        self.v_scale: float | torch.Tensor = cache_scale
        self.sinks: torch.Tensor | None = None
        self.alibi_slopes: torch.Tensor | None = None
        self.projections = self._projections(kv_b_proj, dims)
        self.kv_b_proj = kv_b_proj
        if self.prefill_selection is not None:
            self.config = replace(self.config, mla_prefill=self.prefill_selection.prefill_cls)
        self.kv_cache_spec = self._latent_spec(facts.fp8_dtype or torch.float8_e4m3fn)
        self.spec = self._described(scale, place)
        self._ranks = self._share(place, facts, selector) if place.is_shared else None
        self._gathered = self._gathering()
        self.impl, self.builder = self._made()
        self._checker = CallChecker(self.spec, returns_lse=self.impl.can_return_lse)
        self.handle = register_layer(self)

    def _described(self, scale: float, place: ContextParallel) -> LayerSpec:
        return LayerSpec.from_request(
            self.request,
            scale=scale,
            kv_cache_spec=self.kv_cache_spec,
            dcp_rank=place.dcp_rank,
            dcp_interleave=place.interleave,
        )

    def _selected_prefill(
        self, prefill: str | Policy | None, facts: DeviceFacts, selector: Selector
    ) -> Selection | None:
        """Return the choice of what prefills; None where none is called or a class is given.

        Raises:
            UnsupportedOptionError: one is named that would not be called.
        """
        policy = policy_of(prefill, "prefill")
        given, size = self.config.mla_prefill, self.request.dcp_size
        decodes_all = size > 1 and not self._gathers
        if given is not None or decodes_all:
            if policy.named()[0] is not None:
                why = f"dcp_size={size}" if decodes_all else f"config.mla_prefill={given}"
                raise UnsupportedOptionError(
                    f"prefill={policy.named()[0]} with {why}; allowed: None.",
                    hint="over a sharded cache a layer without kv_b_proj, or of a backend without "
                    "an MLAMetadataBuilder, decodes all rows; otherwise name one in one place.",
                )
            return None
        asked = prefill_request(self.request)
        return selector.resolve(asked, facts, policy, kind="mla_prefill")

    def _made(self) -> tuple[MLAAttentionImpl[Any], AttentionMetadataBuilder[Any]]:
        return self._build(self.spec) if self._ranks is None else self._ranks.built

    def _gathering(self) -> GatheredPrefills | None:
        if self._ranks is None or not self._gathers:
            return None
        return GatheredPrefills(self._ranks, *self._build(self.spec))

    def _projections(self, kv_b_proj: torch.Tensor | None, dims: MLADims) -> MLAProjections | None:
        if kv_b_proj is None:
            return None
        made = MLAProjections(kv_b_proj, dims, self.request.num_heads)
        if kv_b_proj.dtype is not self.request.dtype:
            raise InvalidInputError.for_argument(
                "kv_b_proj dtype", kv_b_proj.dtype, f"{self.request.dtype}, the layer's"
            )
        if kv_b_proj.device.type != self.device.type:
            raise InvalidInputError.for_argument(
                "kv_b_proj device", kv_b_proj.device, f"{self.device}, the layer's"
            )
        return made

    def _share(self, place: ContextParallel, facts: DeviceFacts, selector: Selector) -> RanksLayer:
        """Build this rank's side of a layer whose cache is sharded."""
        backend = self.selection.backend_cls
        return RanksLayer(
            layer=self,
            request=self.request,
            spec=self.spec,
            place=place,
            build=self._build,
            capability=backend.capability(facts, selector.inventory(facts)),
            device=facts,
            is_checked=self.config.checked,
            call=call_forward_mqa,
        )

    def _latent_spec(self, fp8_e4m3_dtype: torch.dtype) -> MLAAttentionSpec:
        size = self.selection.block_size
        spec = spec_for(self.request, block_size=size or 1, fp8_e4m3_dtype=fp8_e4m3_dtype)
        if not isinstance(spec, MLAAttentionSpec):
            raise InvalidRequestError.for_field("mla", self.request.mla, "MLADims")
        return spec

    def _build(
        self, spec: LayerSpec
    ) -> tuple[MLAAttentionImpl[Any], AttentionMetadataBuilder[Any]]:
        """Build implementation and builder of the chosen backend."""
        backend = self.selection.backend_cls
        impl = backend.get_impl_cls()(spec)
        if not isinstance(impl, MLAAttentionImpl):
            raise InvalidRequestError.for_field(
                "backend", self.selection.chosen, "one whose implementation is an MLAAttentionImpl"
            )
        layers = {"attention": spec}
        return impl, backend.get_builder_cls()(spec.kv_cache_spec, layers, self.config, self.device)

    def allocate(self, num_blocks: int) -> torch.Tensor:
        """Return a zero-filled cache (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim)."""
        return self.kv_cache_spec.allocate(num_blocks, self.device)

    def plan(self, common: CommonAttentionMetadata, *, num_blocks: int | None = None) -> StepPlan:
        """Prepare one step; decodes of a batch in another order are put first.

        Args:
            common: the batch; with prefills its host lengths must be exact.
            num_blocks: in checked mode, blocks of the cache, which bound slots and block ids.

        Raises:
            MetadataError: the batch contradicts itself (contents are looked at in checked mode
                only), or was described for blocks of another size.
            UnsupportedOptionError: the batch asks for what the backend does not serve.
        """
        check_batch_kind(common, self.request)
        check_block_size(common.block_size, self.kv_cache_spec)
        if self._ranks is not None:
            common = self._ranks.with_shares(common)
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec, num_blocks=num_blocks)
        bound = blocks_bound(common, self.kv_cache_spec, is_checked=self.config.checked)
        if self._ranks is not None:
            return replace(self._ranks_plan(self._ranks, common), blocks_bound=bound)
        token_order = None
        threshold = self.builder.reorder_batch_threshold or 1
        if self.builder.requires_ordered_batch and common.max_query_len > threshold:
            common, token_order = ordered(common, threshold)
        metadata = self.builder.build(0, common)
        return StepPlan(
            common=common, metadata=metadata, token_order=token_order, blocks_bound=bound
        )

    def _ranks_plan(self, ranks: RanksLayer, common: CommonAttentionMetadata) -> StepPlan:
        if self._gathered is not None:
            step, order = self._gathered.plan(common)
            return StepPlan(common=step.whole, metadata=step, token_order=order)
        step = ranks.plan(common)
        return StepPlan(common=step.common, metadata=step)

    def plan_for_capture(self, common: CommonAttentionMetadata) -> StepPlan:
        """Prepare a step of decodes for a graph to capture; `refresh` brings later ones to it."""
        check_batch_kind(common, self.request)
        check_block_size(common.block_size, self.kv_cache_spec)
        if self._ranks is not None:
            return StepPlan(common=common, metadata=self._ranks.plan_for_capture(common))
        return StepPlan(common=common, metadata=self.builder.build_for_cudagraph_capture(common))

    def refresh(self, plan: StepPlan, common: CommonAttentionMetadata) -> None:
        """Bring a batch of the same shape to a captured step; see `Attention.refresh`."""
        if self._ranks is not None:
            self._ranks.refresh(plan.metadata, common)
        else:
            self.builder.build(0, common)

    def update(
        self, latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, plan: StepPlan
    ) -> None:
        """Write the step's latents (T, kv_lora_rank) and rope parts (T, qk_rope_head_dim).

        Raises:
            InvalidInputError: the batch does not say where they go, or `plan` or the cache are not
                the layer's; nothing was written then.
        """
        self._check_step(plan, kv_cache)
        self._write(latent, rope, kv_cache, plan)

    def _write(
        self, latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, plan: StepPlan
    ) -> None:
        slots = plan.common.slot_mapping
        if slots is None:
            raise InvalidInputError.for_argument(
                "slot_mapping", None, "(T,) int64: the slots of the latents that were given"
            )
        if self._ranks is None:
            self.impl.do_kv_cache_update(self, latent, rope, kv_cache, slots)
        else:
            self._ranks.write(latent, rope, kv_cache, plan.metadata)

    def forward(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: StepPlan,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's latents to the cache, and attend: decodes absorbed, prefills expanded.

        Args:
            query: (T, H, qk_nope_head_dim + qk_rope_head_dim), its rope part rotated.
            latent: (T, kv_lora_rank), normalised.
            rope: (T, qk_rope_head_dim), rotated.
            kv_cache: from `allocate`.
            plan: from `plan`.
            output: (T, H, v_head_dim), written in place.
            lse: (H, T) float32, written in place.

        Returns:
            (T, H, v_head_dim).

        Raises:
            InvalidInputError: an argument does not fit the layer or the plan, or the layer has no
                kv_b_proj; nothing was written then.
            UnsupportedOptionError: a gradient is asked for; nothing was written then.
        """
        self._check_call(query, latent, rope, kv_cache, plan, output, lse)
        if output is None:
            output = query.new_empty(*query.shape[:2], self._dims.v_head_dim)
        order = plan.token_order
        if order is None:
            self._attend(query, latent, rope, kv_cache, plan, output, lse)
            return output
        result = output.new_empty(len(order), *output.shape[1:])
        sums = None if lse is None else lse.new_empty(lse.shape[0], len(order))
        own = query[order], latent[order], rope[order]
        self._attend(*own, kv_cache, plan, result, sums)
        output[order] = result
        if lse is not None and sums is not None:
            lse[:, order] = sums
        return output

    def _attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: StepPlan,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Run a batch in the backend's order."""
        projections, metadata = self.projections, plan.metadata
        if projections is None:
            raise TypeError("a layer that was checked has its projections")
        self._write(latent, rope, kv_cache, plan)
        num_tokens = plan.common.num_actual_tokens
        impl, prefills = self._prefilling(metadata)
        decodes = num_tokens if prefills is None else prefills.num_decode_tokens
        if decodes:
            starts = self._own_rows(plan.common, decodes)
            absorbed = projections.absorb(query[:decodes], starts)
            sums = None if lse is None else lse[:, :decodes]
            if self._ranks is not None:
                found = self._ranks.attend(absorbed, kv_cache, metadata, None, sums)
            else:
                found = self.impl.forward_mqa(self, absorbed, kv_cache, metadata, lse=sums)
            projections.project(found[:decodes], output[:decodes], starts)
        if decodes < num_tokens:
            rows = slice(decodes, num_tokens)
            impl.forward_mha(
                self,
                query[rows],
                latent[rows],
                rope[rows],
                kv_cache,
                prefills,
                output[rows],
                lse=None if lse is None else lse[:, rows],
            )

    def _prefilling(self, metadata: Any) -> tuple[MLAAttentionImpl[Any], Any]:
        """Return what prefills, and the metadata of that; None where all rows are decoded."""
        if self._ranks is None:
            return self.impl, metadata
        impl = self.impl if self._gathered is None else self._gathered.impl
        return impl, metadata.gathered

    def _own_rows(self, common: CommonAttentionMetadata, num_rows: int) -> list[int] | None:
        """Return the bounds of each request's rows, where its products must be its own."""
        if not self.request.batch_invariant:
            return None
        return [start for start in common.query_start_loc_cpu.tolist() if start <= num_rows]

    def _check_step(self, plan: StepPlan, kv_cache: torch.Tensor) -> None:
        """Refuse what is no plan, one of another backend or other ranks, and a cache too small."""
        if not isinstance(plan, StepPlan):
            raise InvalidInputError.for_argument(
                "plan", f"a {type(plan).__name__}", "a StepPlan, which `plan` returns"
            )
        whole = plan.common
        if self._ranks is None:
            self.impl.check_metadata(plan.metadata)
        else:
            whole = require_ranks_step(plan.metadata).whole
        self.kv_cache_spec.check(kv_cache)
        check_cache_size(kv_cache, plan.blocks_bound, whole, self.kv_cache_spec)

    @property
    def output_size(self) -> int:
        """Width of the output of `forward`, v_head_dim."""
        return self._dims.v_head_dim

    @property
    def _dims(self) -> MLADims:
        return self.request.mla or MLADims()

    def _check_call(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: StepPlan,
        output: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> None:
        """Refuse what does not fit before the cache is written."""
        self._check_step(plan, kv_cache)
        if self.projections is None:
            raise InvalidInputError.for_argument(
                "kv_b_proj", None, "the layer's up-projection, from its constructor, for forward"
            )
        rows = plan.common.num_actual_tokens
        self._checker.check_latents(query, latent, rope, output, lse, rows)
        own = {"kv_cache": kv_cache, "output": output}
        refuse_gradients(self, query=query, latent=latent, rope=rope, **own)

    def decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: StepPlan,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the latent cache; call `update` with the step's tokens first.

        Args:
            query: (T, H, kv_lora_rank + qk_rope_head_dim), absorbed.
            kv_cache: from `allocate`.
            plan: from `plan`.
            output: (T, H, kv_lora_rank), written in place.
            lse: (H, T) float32, written in place.

        Returns:
            (T, H, kv_lora_rank).

        Raises:
            InvalidInputError: an argument does not fit the layer, or rows of the plan are prefills.
            UnsupportedOptionError: a gradient is asked for.
        """
        self._check_step(plan, kv_cache)
        refuse_gradients(self, query=query, kv_cache=kv_cache, output=output)
        _, found = self._prefilling(plan.metadata)
        prefills = 0 if found is None else found.num_prefill_tokens
        if prefills:
            raise InvalidInputError.for_argument(
                "plan",
                f"of a batch with {prefills} rows that are prefills",
                "one whose rows are all decodes",
                hint="forward serves both; decode leaves rows of prefills unwritten.",
            )
        if self._ranks is None:
            return self.impl.forward_mqa(self, query, kv_cache, plan.metadata, output, lse=lse)
        self._checker.check_tensors(query, output, lse, plan.common.num_actual_tokens)
        return self._ranks.attend(query, kv_cache, plan.metadata, output, lse)


_ARGUMENTS = ("num_heads", "scale", *(MLAAttention.__init__.__kwdefaults__ or ()))
