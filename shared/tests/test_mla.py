"""`MLAAttention` where no backend is needed to see what it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_shared.errors import InvalidInputError
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.kv_write import concat_and_cache_mla
from attn_shared.layer import StepPlan
from attn_shared.mla import MLAAttention

SPEC = MLAAttentionSpec(block_size=4, head_size=6, kv_lora_rank=4, dtype=torch.float32)


class Recorder:
    """An implementation that takes every plan, and writes as the base class does."""

    def check_metadata(self, metadata: object) -> None:
        return

    def do_kv_cache_update(
        self,
        layer: object,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        concat_and_cache_mla(kv_cache, SPEC, latent, rope, slots)


def writer() -> MLAAttention:
    """Return a layer that can do nothing but write."""
    layer: Any = object.__new__(MLAAttention)
    layer.impl, layer._ranks, layer.kv_cache_spec = Recorder(), None, SPEC
    return layer


def plan(slots: torch.Tensor | None) -> StepPlan:
    common: Any = SimpleNamespace(slot_mapping=slots)
    return StepPlan(common=common, metadata=None)


def test_a_latent_and_its_rope_part_are_one_entry() -> None:
    kv_cache = SPEC.allocate(2, "cpu")
    latent, rope = torch.arange(8.0).view(2, 4), torch.tensor([[9.0, 8.0], [7.0, 6.0]])
    writer().update(latent, rope, kv_cache, plan(torch.tensor([5, -1])))
    assert kv_cache[1, 1].tolist() == [0.0, 1.0, 2.0, 3.0, 9.0, 8.0]
    assert kv_cache.count_nonzero() == 5


def test_latents_without_slots_are_refused() -> None:
    latent, rope, kv_cache = torch.ones(1, 4), torch.ones(1, 2), SPEC.allocate(1, "cpu")
    with pytest.raises(InvalidInputError, match="slot_mapping is None"):
        writer().update(latent, rope, kv_cache, plan(None))
    assert not kv_cache.any()
