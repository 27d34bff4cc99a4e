"""Twins that write a cache wrongly."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_conformance.reference_backend import ReferenceImpl
from attn_conformance.twins.twin import Twin
from attn_shared.backend import AttentionLayer
from attn_shared.dtypes import KVCacheLayout
from attn_shared.kv_cache import AttentionSpec

__all__ = ["TWINS"]


class _Update(ReferenceImpl):
    """Changes what is written before it is."""

    def changed(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        key, value, slots = self.changed(key, value, kv_cache, slot_mapping)
        super().do_kv_cache_update(layer, key, value, kv_cache, slots)


class EveryOtherRow(Twin):
    """Writes the first, third, ... of the new tokens."""

    breaks = ("cache_update",)

    class impl(_Update):
        def changed(
            self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            kept = slots.clone()
            kept[1::2] = -1
            return key, value, kept


class HeadsBackwards(Twin):
    """Writes heads in the wrong order where the layout is head by head."""

    breaks = ("cache_update", "layouts")

    class impl(_Update):
        def changed(
            self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            spec = self.spec.kv_cache_spec
            if isinstance(spec, AttentionSpec) and spec.layout is KVCacheLayout.HND:
                return key.flip(1), value.flip(1), slots
            return key, value, slots


class CutsToBfloat16(Twin):
    """Cuts float32 to bfloat16 where it should round."""

    breaks = ("cache_update",)

    class impl(_Update):
        def changed(
            self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            if kv_cache.dtype is torch.bfloat16 and key.dtype is torch.float32:
                return _cut(key), _cut(value), slots
            return key, value, slots


def _cut(rows: Tensor) -> Tensor:
    return (rows.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)


class LastSlotForNone(Twin):
    """Counts a slot of -1 from the end, as Python does."""

    breaks = ("slot_minus_one",)

    class impl(_Update):
        def changed(
            self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            spec = self.spec.kv_cache_spec
            size = spec.block_size if spec is not None else 1
            return key, value, slots % (len(kv_cache) * size)


class FirstSlotForNone(Twin):
    """Writes slot 0 where none is to be written."""

    breaks = ("slot_minus_one",)

    class impl(_Update):
        def changed(
            self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            return key, value, slots.clamp(min=0)


class StopsAtNone(Twin):
    """Writes nothing after the first slot of -1, which it takes for the padding's begin."""

    breaks = ("slot_minus_one",)

    class impl(_Update):
        def changed(
            self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            count = int((slots >= 0).long().cumprod(0).sum())
            return key, value, slots[:count]


TWINS: tuple[type[Twin], ...] = (
    EveryOtherRow,
    HeadsBackwards,
    CutsToBfloat16,
    LastSlotForNone,
    FirstSlotForNone,
    StopsAtNone,
)
