"""Formats of paged caches: shape, strides, bytes, allocation, and the views that kernels take.

A cache is a plain tensor. What it means (dtype, layout, quantisation, fp8 flavour) is in its
spec, and every kernel of attn reads it through `KVCacheSpec.split`, which gives views of
K (num_blocks, block_size, Hkv, D) and V (num_blocks, block_size, Hkv, Dv) with a dense last
dimension and any other strides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

import torch

from attn_shared.dtypes import (
    KVCacheLayout,
    KVQuantMode,
    dtype_name,
    kv_quant_mode,
    kv_storage_dtype,
)
from attn_shared.errors import InvalidInputError, InvalidRequestError
from attn_shared.request import AttentionRequest, AttentionType, check_window

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "KVCacheLayout",
    "KVCacheSpec",
    "KVViews",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "spec_for",
]

_SCALE_BYTES = 4  # a float32 scale stored beside each entry of a per-token-and-head cache


class KVViews(NamedTuple):
    """Views of one cache tensor.

    key is (num_blocks, block_size, Hkv, D), value (num_blocks, block_size, Hkv, Dv); the scales
    are float32 (num_blocks, block_size, Hkv) for a per-token-and-head cache, else None.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec(ABC):
    """What one layer keeps per block of `block_size` tokens."""

    block_size: int

    def __post_init__(self) -> None:
        """Refuse a block size that is not positive."""
        if isinstance(self.block_size, bool) or self.block_size < 1:
            raise InvalidRequestError.for_field("block_size", self.block_size, "an integer >= 1")

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block, padding included."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of this many tokens needs."""
        return ceil(num_tokens / self.block_size)

    def max_memory_bytes(self, max_model_len: int) -> int:
        """Return the bytes that one sequence of the greatest length needs."""
        return self.num_blocks_for(max_model_len) * self.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A cache of keys and values.

    Attributes:
        num_kv_heads: kv heads of this rank (Hkv).
        head_size: width of a key head (D).
        head_size_v: width of a value head (Dv).
        dtype: the cache tensor's dtype; for fp8 it carries the flavour (e4m3fn or e4m3fnuz).
        kv_cache_dtype: the format's name; says how entries are quantised.
        layout: order of tokens and heads inside a block.
        page_size_padded: bytes from one block to the next where they are padded, else None.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    kv_cache_dtype: str = "auto"
    layout: KVCacheLayout = KVCacheLayout.NHD
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        """Refuse padding that cannot be expressed in whole elements or is too small."""
        KVCacheSpec.__post_init__(self)
        padded = self.page_size_padded
        if padded is not None and (padded < self._dense_page_bytes or padded % self.alignment):
            raise InvalidRequestError.for_field(
                "page_size_padded",
                padded,
                f"a multiple of {self.alignment} bytes, at least {self._dense_page_bytes}",
            )

    @property
    def quant_mode(self) -> KVQuantMode:
        """How entries are quantised."""
        return kv_quant_mode(self.kv_cache_dtype)

    @property
    def has_inline_scales(self) -> bool:
        """Whether a float32 scale is stored beside each entry."""
        return self.quant_mode in (
            KVQuantMode.INT8_PER_TOKEN_HEAD,
            KVQuantMode.FP8_PER_TOKEN_HEAD,
        )

    @property
    def is_quantized(self) -> bool:
        """Whether stored values must be multiplied by a scale."""
        return self.quant_mode is not KVQuantMode.NONE

    @property
    def alignment(self) -> int:
        """Bytes that strides must be multiples of."""
        return _SCALE_BYTES if self.has_inline_scales else self.dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """Whether K and V of different widths share the last dimension."""
        return self.head_size != self.head_size_v

    def _entry(self, size: int) -> int:
        """Elements of one stored head: its values and, where there is one, its scale."""
        if not self.has_inline_scales:
            return size
        return ceil(size / _SCALE_BYTES) * _SCALE_BYTES + _SCALE_BYTES

    @property
    def _dense_page_bytes(self) -> int:
        entries = self._entry(self.head_size) + self._entry(self.head_size_v)
        return self.block_size * self.num_kv_heads * entries * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, padding included."""
        return self.page_size_padded or self._dense_page_bytes

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the logical shape of the cache tensor.

        (num_blocks, 2, block_size, Hkv, entry) where K and V are of one width, else
        (num_blocks, block_size, Hkv, entry of K + entry of V).
        """
        key, value = self._entry(self.head_size), self._entry(self.head_size_v)
        if self.is_packed:
            return (num_blocks, self.block_size, self.num_kv_heads, key + value)
        return (num_blocks, 2, self.block_size, self.num_kv_heads, key)

    def stride_order(self) -> tuple[int, ...]:
        """Return the logical dimensions in their order in memory, outermost first."""
        if self.layout is KVCacheLayout.NHD:
            return (0, 1, 2, 3) if self.is_packed else (0, 1, 2, 3, 4)
        return (0, 2, 1, 3) if self.is_packed else (0, 1, 3, 2, 4)

    def strides(self, num_blocks: int) -> tuple[int, ...]:
        """Return the strides of the cache tensor, in elements."""
        shape, order = self.shape(num_blocks), self.stride_order()
        strides = [0] * len(shape)
        step = 1
        for dim in reversed(order):
            strides[dim] = step
            step *= shape[dim]
        strides[0] = self.page_size_bytes // self.dtype.itemsize
        return tuple(strides)

    def allocate(self, num_blocks: int, device: torch.device | str) -> torch.Tensor:
        """Return a zero-filled cache of `num_blocks` blocks in this spec's shape and strides."""
        if num_blocks < 1:
            raise InvalidInputError.for_argument("num_blocks", num_blocks, "an integer >= 1")
        num_elements = num_blocks * self.page_size_bytes // self.dtype.itemsize
        flat = torch.zeros(num_elements, dtype=self.dtype, device=device)
        return flat.as_strided(self.shape(num_blocks), self.strides(num_blocks))

    def check(self, kv_cache: torch.Tensor) -> None:
        """Refuse a tensor that is not a cache of this spec.

        Raises:
            InvalidInputError: rank, shape, dtype or the last stride differ.
        """
        if kv_cache.dtype is not self.dtype:
            raise InvalidInputError.for_argument(
                "kv_cache dtype",
                dtype_name(kv_cache.dtype),
                f"{dtype_name(self.dtype)} (kv_cache_dtype={self.kv_cache_dtype})",
                hint="an fp8 cache is read only in the flavour that it was written in.",
            )
        expected = self.shape(kv_cache.shape[0] if kv_cache.ndim else 0)
        if tuple(kv_cache.shape) != expected:
            raise InvalidInputError.for_argument(
                "kv_cache shape", tuple(kv_cache.shape), f"(num_blocks, {_tail(expected)})"
            )
        if kv_cache.stride(-1) != 1 and kv_cache.shape[-1] > 1:
            raise InvalidInputError.for_argument(
                "kv_cache last stride", kv_cache.stride(-1), "1 (a dense last dimension)"
            )

    def split(self, kv_cache: torch.Tensor) -> KVViews:
        """Return the views of keys and values (and of their scales) in a cache of this spec.

        Raises:
            InvalidInputError: the tensor is not a cache of this spec.
        """
        self.check(kv_cache)
        if self.is_packed:
            width = self._entry(self.head_size)
            key, value = kv_cache[..., :width], kv_cache[..., width:]
        else:
            key, value = kv_cache.unbind(1)
        if not self.has_inline_scales:
            return KVViews(key, value)
        return KVViews(
            key[..., : self.head_size],
            value[..., : self.head_size_v],
            _inline_scale(key),
            _inline_scale(value),
        )


def _inline_scale(entries: torch.Tensor) -> torch.Tensor:
    return entries[..., -_SCALE_BYTES:].view(torch.float32).squeeze(-1)


def _tail(shape: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Only the last `window_left` + 1 tokens are needed."""

    window_left: int

    def __post_init__(self) -> None:
        """Refuse a negative window."""
        AttentionSpec.__post_init__(self)
        check_window((self.window_left, 0))

    def max_memory_bytes(self, max_model_len: int, *, max_num_batched_tokens: int = 8192) -> int:
        """Return the bytes for the window and one step's tokens, block boundaries included."""
        tokens = min(self.window_left + max_num_batched_tokens, max_model_len)
        return (self.num_blocks_for(tokens) + 1) * self.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Only the tokens of the current chunk are needed."""

    chunk_size: int

    def max_memory_bytes(self, max_model_len: int, *, max_num_batched_tokens: int = 8192) -> int:
        """Return the bytes for one chunk and one step's tokens."""
        tokens = min(self.chunk_size + max_num_batched_tokens, max_model_len)
        return self.num_blocks_for(tokens) * self.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """The encoder's keys and values, written once per request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """No cache: keys and values come with the call."""

    def max_memory_bytes(self, max_model_len: int) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(KVCacheSpec):
    """A cache of latents: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim)."""

    head_size: int
    kv_lora_rank: int
    dtype: torch.dtype
    kv_cache_dtype: str = "auto"
    page_size_padded: int | None = None

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block; there is one latent per token, no factor of two."""
        return self.page_size_padded or self.block_size * self.head_size * self.dtype.itemsize

    def shape(self, num_blocks: int) -> tuple[int, int, int]:
        """Return (num_blocks, block_size, head_size)."""
        return (num_blocks, self.block_size, self.head_size)

    def allocate(self, num_blocks: int, device: torch.device | str) -> torch.Tensor:
        """Return a zero-filled cache."""
        step = self.page_size_bytes // self.dtype.itemsize
        flat = torch.zeros(num_blocks * step, dtype=self.dtype, device=device)
        return flat.as_strided(self.shape(num_blocks), (step, self.head_size, 1))

    def split(self, kv_cache: torch.Tensor) -> KVViews:
        """Return K (num_blocks, block_size, 1, head_size) and V, its first kv_lora_rank columns."""
        if tuple(kv_cache.shape[1:]) != (self.block_size, self.head_size):
            raise InvalidInputError.for_argument(
                "kv_cache shape",
                tuple(kv_cache.shape),
                f"(num_blocks, {self.block_size}, {self.head_size})",
            )
        key = kv_cache.unsqueeze(2)
        return KVViews(key, key[..., : self.kv_lora_rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """State of a recurrent layer: tensors of fixed shapes per request instead of per token."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one request's state."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return self.page_size_padded or sum(prod(shape) * dt.itemsize for shape, dt in pairs)


def spec_for(
    request: AttentionRequest,
    *,
    block_size: int,
    layout: KVCacheLayout = KVCacheLayout.NHD,
    fp8_e4m3_dtype: torch.dtype = torch.float8_e4m3fn,
) -> KVCacheSpec:
    """Return the cache spec that a request's layer needs.

    Args:
        request: what the layer asks.
        block_size: tokens per block, as selected.
        layout: order inside a block, as selected.
        fp8_e4m3_dtype: the device's e4m3 flavour.

    Raises:
        InvalidRequestError: the cache format is packed and has no element dtype.
    """
    storage = kv_storage_dtype(request.kv_cache_dtype, request.dtype, fp8_e4m3_dtype)
    if request.mla is not None:
        return MLAAttentionSpec(
            block_size=block_size,
            head_size=request.head_size,
            kv_lora_rank=request.mla.kv_lora_rank,
            dtype=storage,
            kv_cache_dtype=request.kv_cache_dtype,
        )
    common = {
        "block_size": block_size,
        "num_kv_heads": request.num_kv_heads,
        "head_size": request.head_size,
        "head_size_v": request.value_size,
        "dtype": storage,
        "kv_cache_dtype": request.kv_cache_dtype,
        "layout": layout,
    }
    if request.is_cache_free:
        return EncoderOnlyAttentionSpec(**common)  # type: ignore[arg-type]
    if request.attn_type is AttentionType.ENCODER_DECODER:
        return CrossAttentionSpec(**common)  # type: ignore[arg-type]
    if request.chunk_size is not None:
        return ChunkedLocalAttentionSpec(chunk_size=request.chunk_size, **common)  # type: ignore[arg-type]
    if request.window[0] is not None and not request.non_causal:
        return SlidingWindowSpec(window_left=request.window[0], **common)  # type: ignore[arg-type]
    return FullAttentionSpec(**common)  # type: ignore[arg-type]
