"""Multi-head latent attention for a user with no engine: select, allocate, plan, prefill, decode.

The projections (kv_b_proj, and W_UK, W_UV absorbed into the query and output) are the caller's:
`prefill` takes expanded heads, `decode` takes absorbed queries and gives latents.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_shared._dcp_layer import call_forward_mqa
from attn_shared._layer_inputs import group_sizes
from attn_shared._ranks_layer import RanksLayer
from attn_shared.backend import AttentionMetadataBuilder, MLAAttentionImpl
from attn_shared.call_checks import CallChecker
from attn_shared.checked import check_metadata
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnsupportedOptionError
from attn_shared.kv_cache import MLAAttentionSpec, spec_for
from attn_shared.layer import StepPlan
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ranks import ContextParallel
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.selection import Policy
from attn_shared.selector import DEFAULT_SELECTOR, Selector
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["MLAAttention"]


class MLAAttention:
    """One layer of multi-head latent attention over a cache of latents.

    Attributes:
        selection: which backend runs it, and why.
        request: what was asked.
        spec: the layer's description.
        kv_cache_spec: the cache's format.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        scale: float,
        dims: MLADims | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        backend: str | None = None,
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
            dims: widths; None: those of DeepSeek-V2 and V3.
            dtype: dtype of query and latent.
            device: torch device to run on.
            backend: name of the backend to use; None or "auto" lets the selector choose.
            cache_scale: of the entries of an fp8 cache: read back = stored * scale.
            config: bounds of the batches; `checked` validates each batch's contents.
            context_parallel: the ranks among which the cache of latents is sharded, each with its
                own heads; `decode` then serves every phase.
            selector: who selects.
            options: further fields of `AttentionRequest`.

        Raises:
            NoBackendError: nothing serves the layer; the message has every reason.
            RanksDisagreeError: another rank built another layer.
        """
        dims = dims or MLADims()
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
        self.device = torch.device(device)
        facts = selector.device_facts(self.device)
        policy = Policy(backend=None if backend == "auto" else backend)
        self.selection = selector.resolve(self.request, facts, policy)
        self.q_scale: float | torch.Tensor = 1.0
        self.k_scale: float | torch.Tensor = cache_scale
        self.v_scale: float | torch.Tensor = cache_scale
        self.sinks: torch.Tensor | None = None
        self.alibi_slopes: torch.Tensor | None = None
        self.config = config or BuildConfig()
        self.kv_cache_spec = self._latent_spec(facts.fp8_dtype or torch.float8_e4m3fn)
        self.spec = LayerSpec.from_request(
            self.request,
            scale=scale,
            kv_cache_spec=self.kv_cache_spec,
            dcp_rank=place.dcp_rank,
            dcp_interleave=place.interleave,
        )
        self.impl: MLAAttentionImpl[Any]
        self._ranks = None
        if place.is_shared:
            self._ranks = self._share(place, facts, selector)
            self.impl, self.builder = self._ranks.impl, self._ranks.builder
        else:
            self.impl, self.builder = self._build(self.spec)
        self._checker = CallChecker(self.spec, returns_lse=self.impl.can_return_lse)

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

    def plan(self, common: CommonAttentionMetadata) -> StepPlan:
        """Prepare one step; see `Attention.plan`."""
        if self._ranks is not None:
            common = self._ranks.with_shares(common)
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
        if self._ranks is not None:
            step = self._ranks.plan(common)
            return StepPlan(common=step.common, metadata=step)
        return StepPlan(common=common, metadata=self.builder.build(0, common))

    def update(
        self, latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, plan: StepPlan
    ) -> None:
        """Write the step's latents (T, kv_lora_rank) and rope parts (T, qk_rope_head_dim).

        Raises:
            InvalidInputError: the batch does not say where they go.
        """
        slots = plan.common.slot_mapping
        if slots is None:
            raise InvalidInputError.for_argument(
                "slot_mapping", None, "(T,) int64: the slots of the latents that were given"
            )
        if self._ranks is None:
            self.impl.do_kv_cache_update(self, latent, rope, kv_cache, slots)
        else:
            self._ranks.write(latent, rope, kv_cache, plan.metadata)

    def prefill(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: StepPlan,
    ) -> torch.Tensor:
        """Write the cache, and attend with expanded heads.

        Args:
            query: (T, H, qk_nope_head_dim + qk_rope_head_dim).
            latent: (T, kv_lora_rank).
            rope: (T, qk_rope_head_dim).
            kv_cache: from `allocate`.
            plan: from `plan`.

        Returns:
            (T, H, v_head_dim).

        Raises:
            UnsupportedOptionError: the cache is sharded, so that no rank has a request's latents.
        """
        if self._ranks is not None:
            raise UnsupportedOptionError(
                f"prefill with expanded heads reads whole requests, and dcp_size="
                f"{self.request.dcp_size} shards them.",
                hint="call update, and decode with absorbed queries, in every phase.",
            )
        self.update(latent, rope, kv_cache, plan)
        dims = self.request.mla or MLADims()
        output = query.new_empty((*query.shape[:-1], dims.v_head_dim))
        self.impl.forward_mha(self, query, latent, rope, kv_cache, plan.metadata, output)
        return output

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
        """
        if self._ranks is None:
            return self.impl.forward_mqa(self, query, kv_cache, plan.metadata, output, lse=lse)
        self._checker.check_tensors(query, output, lse, plan.common.num_actual_tokens)
        self.kv_cache_spec.split(kv_cache)
        return self._ranks.attend(query, kv_cache, plan.metadata, output, lse)
