"""One forward pass over a group of layers: which places are answered, and by what plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_shared.layer import Attention, StepPlan
from attn_shared.mla import MLAAttention
from attn_transformers.tokens import Tokens

__all__ = ["Turn"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One forward pass, as all layers of a group run it.

    Attributes:
        start, stop: places of the pass, padding included.
        queries: which of them are answered.
        plan: the batch and the backend's plan; None where every place is padding.
    """

    start: int
    stop: int
    queries: Tokens
    plan: StepPlan | None

    def run(
        self,
        attention: Attention,
        plan: StepPlan,
        cache: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a layer, and return (B, T, Hq, Dv) with zeros for padding that is not answered.

        Args:
            attention: the layer.
            plan: the pass's own.
            cache: the layer's blocks.
            query: (B, Hq, T, D).
            key: (B, Hkv, T, D); None where it is written already.
            value: (B, Hkv, T, Dv), or None.
        """
        queries = self.queries
        if queries.is_one_each and query.shape[2] == 1:  # views alone: decodes are many and short
            if key is not None and value is not None:
                key, value = key.squeeze(2), value.squeeze(2)
            return attention.forward(query.squeeze(2), key, value, cache, plan).unsqueeze(1)
        if key is not None and value is not None:
            key, value = queries.gather(key), queries.gather(value)
        output = query.new_empty((queries.count, query.shape[1], attention.spec.head_size_v))
        attention.forward(queries.gather(query), key, value, cache, plan, output)
        return queries.scatter(output)

    def run_latents(
        self,
        attention: MLAAttention,
        plan: StepPlan,
        cache: torch.Tensor,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """Run a layer of latent attention, as `run`.

        Args:
            attention: the layer.
            plan: the pass's own.
            cache: the layer's blocks.
            query: (B, H, T, D).
            latent: (B, 1, T, kv_lora_rank).
            rope: (B, 1, T, qk_rope_head_dim).
            width: of its output, v_head_dim.
        """
        gather = self.queries.gather
        output = query.new_empty((self.queries.count, query.shape[1], width))
        states = gather(query), gather(latent).squeeze(1), gather(rope).squeeze(1)
        attention.forward(*states, cache, plan, output)
        return self.queries.scatter(output)
