"""The model of mini_engine.py: two layers of attention with random weights, a small vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_shared import Attention, CommonAttentionMetadata

__all__ = ["Model"]


class Model(nn.Module):
    """Embedding, two layers that are attention alone, and logits."""

    def __init__(self, vocab: int = 97, heads: int = 4, kv_heads: int = 2, width: int = 32) -> None:
        """Draw the weights, and let a backend be chosen for the layers."""
        super().__init__()
        torch.manual_seed(0)  # the same weights in every run
        self.block_size, size = 16, heads * width
        self.parts = [heads, kv_heads, kv_heads]
        self.embed, self.head = nn.Embedding(vocab, size), nn.Linear(size, vocab)
        self.projections = nn.ModuleList(nn.Linear(size, sum(self.parts) * width) for _ in range(2))
        self.layers = [
            Attention(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_size=width,
                dtype=torch.float32,
                block_size=self.block_size,
            )
            for _ in range(2)
        ]

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, caches: list[Tensor], common: CommonAttentionMetadata
    ) -> Tensor:
        """Return logits (T, vocab) of a step; its keys and values go into the caches.

        Args:
            tokens: (T,) int64, requests one after the other.
            caches: one per layer, from its `allocate`.
            common: the batch.
        """
        hidden: Tensor = self.embed(tokens)
        plan = self.layers[0].plan(common)  # layers that are alike share it
        for layer, projection, cache in zip(self.layers, self.projections, caches, strict=True):
            heads = projection(hidden).unflatten(-1, (sum(self.parts), -1))
            query, key, value = heads.split(self.parts, dim=1)
            hidden = hidden + layer.forward(query, key, value, cache, plan).flatten(1)
        logits: Tensor = self.head(hidden)
        return logits
