"""Multi-head latent attention for a user with no engine: select, allocate, plan, prefill, decode.

The projections (kv_b_proj, and W_UK, W_UV absorbed into the query and output) are the caller's:
`prefill` takes expanded heads, `decode` takes absorbed queries and gives latents.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_shared.backend import MLAAttentionImpl
from attn_shared.checked import check_metadata
from attn_shared.errors import InvalidInputError, InvalidRequestError
from attn_shared.kv_cache import MLAAttentionSpec, spec_for
from attn_shared.layer import StepPlan
from attn_shared.metadata import CommonAttentionMetadata
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
            selector: who selects.
            options: further fields of `AttentionRequest`.

        Raises:
            NoBackendError: nothing serves the layer; the message has every reason.
            InvalidRequestError: the cache or the tokens are to be spread over ranks.
        """
        dims = dims or MLADims()
        for name in ("dcp_size", "pcp_size"):
            if options.get(name, 1) != 1:
                raise InvalidRequestError.for_field(
                    name, options[name], "1 for MLAAttention: Attention alone combines ranks"
                )
        self.request = AttentionRequest(
            num_heads=num_heads,
            num_kv_heads=1,
            head_size=dims.latent_size,
            head_size_v=dims.kv_lora_rank,
            dtype=dtype,
            mla=dims,
            **options,
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
            self.request, scale=scale, kv_cache_spec=self.kv_cache_spec
        )
        self.impl = self._build_impl()
        self.builder = self.selection.backend_cls.get_builder_cls()(
            self.kv_cache_spec, {"attention": self.spec}, self.config, self.device
        )

    def _latent_spec(self, fp8_e4m3_dtype: torch.dtype) -> MLAAttentionSpec:
        size = self.selection.block_size
        spec = spec_for(self.request, block_size=size or 1, fp8_e4m3_dtype=fp8_e4m3_dtype)
        if not isinstance(spec, MLAAttentionSpec):
            raise InvalidRequestError.for_field("mla", self.request.mla, "MLADims")
        return spec

    def _build_impl(self) -> MLAAttentionImpl[Any]:
        impl = self.selection.backend_cls.get_impl_cls()(self.spec)
        if not isinstance(impl, MLAAttentionImpl):
            raise InvalidRequestError.for_field(
                "backend", self.selection.chosen, "one whose implementation is an MLAAttentionImpl"
            )
        return impl

    def allocate(self, num_blocks: int) -> torch.Tensor:
        """Return a zero-filled cache (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim)."""
        return self.kv_cache_spec.allocate(num_blocks, self.device)

    def plan(self, common: CommonAttentionMetadata) -> StepPlan:
        """Prepare one step; see `Attention.plan`."""
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
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
        self.impl.do_kv_cache_update(self, latent, rope, kv_cache, slots)

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
        """
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
        return self.impl.forward_mqa(self, query, kv_cache, plan.metadata, output, lse=lse)
