"""Formats of paged caches: shape, strides, bytes, allocation, and the views that kernels take.

A cache is a plain tensor. What it means (dtype, layout, quantisation, fp8 flavour) is in its
spec, and every kernel of attn reads it through `PagedSpec.split`, which gives views of
K (num_blocks, block_size, Hkv, D) and V (num_blocks, block_size, Hkv, Dv) with a dense last
dimension and any other strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypedDict

import torch

from attn_shared._fields import member_of, require_positive
from attn_shared.dtypes import KVCacheLayout, KVQuantMode, kv_quant_mode, kv_storage_dtype
from attn_shared.errors import InvalidInputError, InvalidRequestError
from attn_shared.nvfp4 import BLOCK, split_nvfp4
from attn_shared.paged_spec import KVCacheSpec, KVViews, PagedSpec
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
    "NVFP4AttentionSpec",
    "PagedSpec",
    "SlidingWindowSpec",
    "spec_for",
]

_SCALE_BYTES = 4  # a float32 scale stored beside each entry of a per-token-and-head cache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(PagedSpec):
    """A cache of keys and values.

    Attributes:
        num_kv_heads: kv heads of this rank (Hkv).
        head_size: width of a key head (D).
        head_size_v: width of a value head (Dv).
        layout: order of tokens and heads inside a block.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int
    layout: KVCacheLayout = KVCacheLayout.NHD

    def __post_init__(self) -> None:
        """Refuse heads that are not positive, and what no paged cache can have."""
        for name in ("num_kv_heads", "head_size", "head_size_v"):
            require_positive(name, getattr(self, name))
        object.__setattr__(self, "layout", member_of(KVCacheLayout, "layout", self.layout))
        PagedSpec.__post_init__(self)

    @property
    def has_inline_scales(self) -> bool:
        """Whether a float32 scale is stored beside each entry."""
        return self.quant_mode in (
            KVQuantMode.INT8_PER_TOKEN_HEAD,
            KVQuantMode.FP8_PER_TOKEN_HEAD,
        )

    @property
    def alignment(self) -> int:
        """Bytes that the strides of blocks must be multiples of."""
        return _SCALE_BYTES if self.has_inline_scales else self.dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """Whether K and V of different widths share the last dimension."""
        return self.head_size != self.head_size_v

    def _entry(self, size: int) -> int:
        """Elements of one stored head: its values and, where there is one, its aligned scale."""
        if not self.has_inline_scales:
            return size
        return -(-size // _SCALE_BYTES) * _SCALE_BYTES + _SCALE_BYTES

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
    """Return the float32 (num_blocks, block_size, Hkv) that end each entry."""
    if any(stride % _SCALE_BYTES for stride in (entries.storage_offset(), *entries.stride()[:-1])):
        raise InvalidInputError.for_argument(
            "strides of kv_cache",
            entries.stride(),
            f"multiples of {_SCALE_BYTES} bytes, where scales are stored beside entries",
        )
    return entries[..., -_SCALE_BYTES:].view(torch.float32).squeeze(-1)


class FullAttentionSpec(AttentionSpec):
    """Every token is kept."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NVFP4AttentionSpec(AttentionSpec):
    """A cache of 4 bits per value, as bytes: the last dimension counts those of a token and head.

    Of each block and head the values of all tokens come first, then their scales: `split` has the
    views. Every token is kept.
    """

    def __post_init__(self) -> None:
        """Refuse another layout, and heads that are not whole blocks of one width."""
        AttentionSpec.__post_init__(self)
        if self.layout is not KVCacheLayout.HND:
            raise InvalidRequestError.for_field(
                "layout", self.layout, f"HND with kv_cache_dtype={self.kv_cache_dtype!r}"
            )
        if self.head_size % BLOCK or self.is_packed:
            raise InvalidRequestError.for_field(
                "head_size, head_size_v",
                (self.head_size, self.head_size_v),
                f"one multiple of {BLOCK} with kv_cache_dtype={self.kv_cache_dtype!r}",
            )

    def _storage_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def _entry(self, size: int) -> int:
        return size // 2 + size // BLOCK

    def split(self, kv_cache: torch.Tensor) -> KVViews:
        """Return values, uint8 (num_blocks, block_size, Hkv, D / 2), and scales, e4m3 (... D / 16).

        Raises:
            InvalidInputError: the tensor is not a cache of this spec, or not in its layout.
        """
        self.check(kv_cache)
        expected = self.strides(1)[1:]
        if kv_cache.stride()[1:] != expected:
            raise InvalidInputError.for_argument(
                "strides of kv_cache", kv_cache.stride()[1:], f"{expected}, its spec's"
            )
        key, value = (split_nvfp4(side, self.head_size) for side in kv_cache.unbind(1))
        return KVViews(key[0], value[0], key[1], value[1])


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

    def __post_init__(self) -> None:
        """Refuse a chunk that is not positive."""
        AttentionSpec.__post_init__(self)
        require_positive("chunk_size", self.chunk_size)

    def max_memory_bytes(self, max_model_len: int, *, max_num_batched_tokens: int = 8192) -> int:
        """Return the bytes for one chunk and one step's tokens."""
        tokens = min(self.chunk_size + max_num_batched_tokens, max_model_len)
        return self.num_blocks_for(tokens) * self.page_size_bytes


class CrossAttentionSpec(AttentionSpec):
    """The encoder's keys and values, written once per request."""

    __slots__ = ()


class EncoderOnlyAttentionSpec(AttentionSpec):
    """No cache: keys and values come with the call."""

    __slots__ = ()

    def max_memory_bytes(self, max_model_len: int) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(PagedSpec):
    """A cache of latents, one per token, in the layout of tokens.

    Attributes:
        head_size: width of an entry, kv_lora_rank + qk_rope_head_dim.
        kv_lora_rank: width of the latent, which comes first and is also the value.
    """

    head_size: int
    kv_lora_rank: int

    def __post_init__(self) -> None:
        """Refuse widths that do not fit, and what no paged cache can have."""
        require_positive("head_size", self.head_size)
        require_positive("kv_lora_rank", self.kv_lora_rank)
        if self.kv_lora_rank > self.head_size:
            raise InvalidRequestError.for_field(
                "kv_lora_rank", self.kv_lora_rank, f"at most head_size={self.head_size}"
            )
        PagedSpec.__post_init__(self)

    def shape(self, num_blocks: int) -> tuple[int, int, int]:
        """Return (num_blocks, block_size, head_size)."""
        return (num_blocks, self.block_size, self.head_size)

    def stride_order(self) -> tuple[int, int, int]:
        """Return (0, 1, 2): memory is in logical order."""
        return (0, 1, 2)

    def split(self, kv_cache: torch.Tensor) -> KVViews:
        """Return K (num_blocks, block_size, 1, head_size) and V, its first kv_lora_rank columns.

        Raises:
            InvalidInputError: the tensor is not a cache of this spec.
        """
        self.check(kv_cache)
        key = kv_cache.unsqueeze(2)
        return KVViews(key, key[..., : self.kv_lora_rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """State of a recurrent layer: tensors of fixed shapes per request instead of per token."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        """Refuse shapes without dtypes, and padding that is too small."""
        KVCacheSpec.__post_init__(self)
        if len(self.shapes) != len(self.dtypes):
            raise InvalidRequestError.for_field(
                "dtypes", self.dtypes, f"{len(self.shapes)}, one for each of shapes"
            )
        if self.page_size_padded is not None and self.page_size_padded < self._dense_page_bytes:
            raise InvalidRequestError.for_field(
                "page_size_padded", self.page_size_padded, f"at least {self._dense_page_bytes}"
            )

    @property
    def _dense_page_bytes(self) -> int:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * dtype.itemsize for shape, dtype in pairs)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one request's state."""
        return self.page_size_padded or self._dense_page_bytes


class _Common(TypedDict):
    """The fields of every `AttentionSpec`."""

    block_size: int
    dtype: torch.dtype
    kv_cache_dtype: str
    num_kv_heads: int
    head_size: int
    head_size_v: int
    layout: KVCacheLayout


def spec_for(
    request: AttentionRequest,
    *,
    block_size: int,
    layout: KVCacheLayout = KVCacheLayout.NHD,
    fp8_e4m3_dtype: torch.dtype = torch.float8_e4m3fn,
) -> AttentionSpec | MLAAttentionSpec:
    """Return the cache spec that a request's layer needs.

    Args:
        request: what the layer asks.
        block_size: tokens per block, as selected.
        layout: order inside a block, as selected.
        fp8_e4m3_dtype: the device's e4m3 flavour.

    Raises:
        InvalidRequestError: the cache format is packed and has no element dtype.
    """
    is_nvfp4 = kv_quant_mode(request.kv_cache_dtype) is KVQuantMode.NVFP4 and request.mla is None
    storage = torch.uint8
    if not is_nvfp4:
        storage = kv_storage_dtype(request.kv_cache_dtype, request.dtype, fp8_e4m3_dtype)
    if request.mla is not None:
        return MLAAttentionSpec(
            block_size=block_size,
            dtype=storage,
            kv_cache_dtype=request.kv_cache_dtype,
            head_size=request.head_size,
            kv_lora_rank=request.mla.kv_lora_rank,
        )
    common = _Common(
        block_size=block_size,
        dtype=storage,
        kv_cache_dtype=request.kv_cache_dtype,
        num_kv_heads=request.num_kv_heads,
        head_size=request.head_size,
        head_size_v=request.value_size,
        layout=layout,
    )
    return NVFP4AttentionSpec(**common) if is_nvfp4 else _spec_of(request, common)


def _spec_of(request: AttentionRequest, common: _Common) -> AttentionSpec:
    """Return the spec that keeps no more tokens than the request's rows can see."""
    if request.is_cache_free:
        return EncoderOnlyAttentionSpec(**common)
    if request.attn_type is AttentionType.ENCODER_DECODER:
        return CrossAttentionSpec(**common)
    if request.use_mm_prefix:  # a range reaches beyond window and chunk
        return FullAttentionSpec(**common)
    if request.chunk_size is not None:
        return ChunkedLocalAttentionSpec(**common, chunk_size=request.chunk_size)
    if request.window[0] is not None:
        return SlidingWindowSpec(**common, window_left=request.window[0])
    return FullAttentionSpec(**common)
