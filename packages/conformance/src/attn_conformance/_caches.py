"""Caches of a case: numbers where somebody reads, poison where nobody may."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from attn_conformance._tables import Placement
from attn_conformance.case import Case
from attn_shared.kv_cache import AttentionSpec, KVViews, MLAAttentionSpec, spec_for
from attn_shared.kv_write import concat_and_cache_mla, write_kv

__all__ = [
    "Entries",
    "LatentEntries",
    "cache_spec",
    "differing_blocks",
    "filled_cache",
    "host_cache",
    "latent_spec",
    "raw_bytes",
]

S = TypeVar("S", AttentionSpec, MLAAttentionSpec)
T = TypeVar("T", AttentionSpec, MLAAttentionSpec, contravariant=True)

_LARGE_SCALE = 1e30  # of an entry that nobody may read, in a cache with scales of its own
_WHOLE_BYTES = 2**26  # caches up to this size are compared byte for byte


class _Written(Protocol[T]):
    """What a cache of one kind of spec is to hold."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Where it goes."""

    def write(self, kv_cache: Tensor, spec: T) -> None:
        """Store it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """Keys (n, Hkv, D) and values (n, Hkv, Dv) for n slots, with the scales they are stored by."""

    key: Tensor
    value: Tensor
    slots: tuple[int, ...]
    k_scale: float | Tensor
    v_scale: float | Tensor

    def without(self, slots: Collection[int]) -> Entries:
        """Return the entries of other slots."""
        dropped = set(slots)
        kept = [index for index, slot in enumerate(self.slots) if slot not in dropped]
        return replace(
            self,
            key=self.key[kept],
            value=self.value[kept],
            slots=tuple(self.slots[index] for index in kept),
        )

    def followed_by(self, other: Entries) -> Entries:
        """Return these entries and then those; rows past the other's slots are left out."""
        count = len(other.slots)
        return replace(
            self,
            key=torch.cat([self.key, other.key[:count]]),
            value=torch.cat([self.value, other.value[:count]]),
            slots=self.slots + other.slots,
        )

    def write(self, kv_cache: Tensor, spec: AttentionSpec) -> None:
        """Store all of them with torch alone."""
        write_kv(
            kv_cache,
            spec,
            self.key,
            self.value,
            torch.tensor(self.slots, dtype=torch.int64, device=kv_cache.device),
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentEntries:
    """Latents (n, kv_lora_rank) and rope parts for n slots, with the scale they are stored by."""

    latent: Tensor
    rope: Tensor
    slots: tuple[int, ...]
    scale: float | Tensor

    def write(self, kv_cache: Tensor, spec: MLAAttentionSpec) -> None:
        """Store all of them with torch alone."""
        slots = torch.tensor(self.slots, dtype=torch.int64, device=kv_cache.device)
        concat_and_cache_mla(kv_cache, spec, self.latent, self.rope, slots, scale=self.scale)


def latent_spec(case: Case, fp8_e4m3_dtype: torch.dtype) -> MLAAttentionSpec:
    """Return the format of the cache of latents of a case."""
    flavour = case.fp8_e4m3_dtype or fp8_e4m3_dtype
    spec = spec_for(case.request, block_size=case.block_size, fp8_e4m3_dtype=flavour)
    if not isinstance(spec, MLAAttentionSpec):
        raise TypeError(f"a case of {type(spec).__name__} is none of latent attention")
    if not case.block_padding:
        return spec
    padding = case.block_padding * spec.dtype.itemsize
    return replace(spec, page_size_padded=spec.page_size_bytes + padding)


def cache_spec(case: Case, fp8_e4m3_dtype: torch.dtype) -> AttentionSpec | None:
    """Return the format of the case's cache; None where it has none."""
    if case.is_cache_free:
        return None
    flavour = case.fp8_e4m3_dtype or fp8_e4m3_dtype
    spec = spec_for(
        case.request, block_size=case.block_size, layout=case.layout, fp8_e4m3_dtype=flavour
    )
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"a case of {type(spec).__name__} is none of ordinary attention")
    if not case.block_padding:
        return spec
    padding = case.block_padding * spec.alignment
    return replace(spec, page_size_padded=spec.page_size_bytes + padding)


def filled_cache(
    case: Case,
    spec: S,
    placement: Placement,
    entries: _Written[S],
    device: torch.device,
) -> Tensor:
    """Return a cache that holds the entries; all else is poison.

    Blocks of nobody and the gaps between blocks hold NaN. Slots past a sequence's end hold the
    largest finite number, or NaN where the case says so.
    """
    kv_cache = _allocate(case, spec, placement, device)
    views = spec.split(kv_cache)
    written = set(entries.slots)
    owned = {slot // spec.block_size for slot in placement.live_slots}
    for block in () if case.nan_tail else sorted(owned):
        for offset in range(spec.block_size):
            if block * spec.block_size + offset not in written:
                _fill_slot(views, block, offset)
    entries.write(kv_cache, spec)
    return kv_cache


def _allocate(
    case: Case, spec: AttentionSpec | MLAAttentionSpec, placement: Placement, device: torch.device
) -> Tensor:
    """Return a cache of NaN; of one that is sparse, only the blocks that matter are touched."""
    count = placement.num_blocks
    storage = torch.empty(
        count * spec.page_size_bytes // spec.dtype.itemsize, dtype=spec.dtype, device=device
    )
    kv_cache = storage.as_strided(spec.shape(count), spec.strides(count))
    if not case.cache_elements:
        _poison(storage)
        return kv_cache
    for block in placement.block_ids:
        _poison(kv_cache[block])
    return kv_cache


def _poison(memory: Tensor) -> None:
    """Fill with NaN, or, where a byte cannot be NaN, with bytes that read as NaN in float32."""
    if memory.dtype is torch.int8:
        memory.fill_(-1)
    elif memory.dtype.itemsize == 1:
        nan = 0x80 if memory.dtype is torch.float8_e4m3fnuz else 0x7F
        memory.view(torch.uint8).fill_(nan)
    else:
        memory.fill_(torch.nan)


def _fill_slot(views: KVViews, block: int, offset: int) -> None:
    """Put the largest finite number into a slot that nobody owns yet."""
    for view in (views.key, views.value):
        limit = 127 if view.dtype is torch.int8 else torch.finfo(view.dtype).max
        shape, device = view.shape[2:], view.device
        entry = torch.full(shape, limit, dtype=torch.float32, device=device).to(view.dtype)
        _assign(view, block, offset, entry)
    for scale in (views.key_scale, views.value_scale):
        if scale is not None:
            scale[block, offset] = _LARGE_SCALE


def _assign(view: Tensor, block: int, offset: int, entry: Tensor) -> None:
    if view.dtype.itemsize == 1:  # not every device fills float8
        view, entry = view.view(torch.uint8), entry.view(torch.uint8)
    view[block, offset] = entry


def differing_blocks(actual: Tensor, expected: Tensor, placement: Placement) -> list[int]:
    """Return the blocks of two caches of one shape whose bytes differ, gaps between them included.

    In a sparse cache only the blocks that matter are looked at.
    """
    if actual.untyped_storage().nbytes() <= _WHOLE_BYTES:
        ours, theirs = raw_bytes(actual), raw_bytes(expected)
        differing = (ours != theirs).nonzero().flatten()
        step = actual.stride(0) * actual.element_size()
        return sorted({index // step for index in differing.tolist()})
    return [
        block
        for block in placement.block_ids
        if not torch.equal(_as_bytes(actual[block]), _as_bytes(expected[block]))
    ]


def _as_bytes(block: Tensor) -> Tensor:
    return block.contiguous().view(torch.uint8)


def host_cache(kv_cache: Tensor) -> Tensor:
    """Return a copy in host memory, with the same strides."""
    copied = raw_bytes(kv_cache).cpu()
    flat = torch.empty(0, dtype=kv_cache.dtype).set_(copied.untyped_storage())
    return flat.as_strided(kv_cache.shape, kv_cache.stride(), kv_cache.storage_offset())


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage, gaps included: uint8 (n,), the same memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage())
    return flat
