"""What every paged cache has: blocks of tokens in one tensor, whose format is a frozen record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from attn_shared._fields import require_positive
from attn_shared.argument_checks import INT64_MOST
from attn_shared.dtypes import KVQuantMode, dtype_name, kv_quant_mode, kv_storage_dtypes
from attn_shared.errors import InvalidInputError, InvalidRequestError
from attn_shared.large_pages import advise_large_pages

__all__ = ["KVCacheSpec", "KVViews", "PagedSpec"]


class KVViews(NamedTuple):
    """Views of one cache tensor.

    key is (num_blocks, block_size, Hkv, D), value (num_blocks, block_size, Hkv, Dv); the scales
    are float32 (num_blocks, block_size, Hkv) for a per-token-and-head cache, else None. A cache of
    4 bits has uint8 (..., D / 2) and float8_e4m3fn (..., D / 16).
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
        require_positive("block_size", self.block_size)

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block, padding included."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of this many tokens needs."""
        return -(-num_tokens // self.block_size)

    def max_memory_bytes(self, max_model_len: int) -> int:
        """Return the bytes that one sequence of the greatest length needs."""
        return self.num_blocks_for(max_model_len) * self.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSpec(KVCacheSpec):
    """A cache that is one tensor with blocks as its first dimension.

    Attributes:
        dtype: the cache tensor's dtype; for fp8 it carries the flavour (e4m3fn or e4m3fnuz).
        kv_cache_dtype: the format's name; says how entries are quantised.
        page_size_padded: bytes from one block to the next where they are padded, else None.
    """

    dtype: torch.dtype
    kv_cache_dtype: str = "auto"
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        """Refuse a dtype of another format, and padding that is too small or breaks elements."""
        KVCacheSpec.__post_init__(self)
        allowed = self._storage_dtypes()
        if self.dtype not in allowed:
            raise InvalidRequestError.for_field(
                "dtype",
                self.dtype,
                f"{' or '.join(map(dtype_name, allowed))} with "
                f"kv_cache_dtype={self.kv_cache_dtype!r}",
            )
        if self.page_size_padded is not None:
            self._check_padding(self.page_size_padded)

    def _storage_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes that a cache tensor of this format may have."""
        return kv_storage_dtypes(self.kv_cache_dtype)

    def _check_padding(self, padded: int) -> None:
        require_positive("page_size_padded", padded)
        if padded < self._dense_page_bytes or padded % self.alignment:
            raise InvalidRequestError.for_field(
                "page_size_padded",
                padded,
                f"a multiple of {self.alignment} bytes, at least {self._dense_page_bytes}",
            )

    @abstractmethod
    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the logical shape of the cache tensor."""

    @abstractmethod
    def stride_order(self) -> tuple[int, ...]:
        """Return the logical dimensions in their order in memory, outermost first."""

    @abstractmethod
    def split(self, kv_cache: torch.Tensor) -> KVViews:
        """Return the views of keys and values in a cache of this spec."""

    @property
    def quant_mode(self) -> KVQuantMode:
        """How entries are quantised."""
        return kv_quant_mode(self.kv_cache_dtype)

    @property
    def is_quantized(self) -> bool:
        """Whether stored values must be multiplied by a scale."""
        return self.quant_mode is not KVQuantMode.NONE

    @property
    def alignment(self) -> int:
        """Bytes that the strides of blocks must be multiples of."""
        return self.dtype.itemsize

    @property
    def _dense_page_bytes(self) -> int:
        return prod(self.shape(1)) * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, padding included."""
        return self.page_size_padded or self._dense_page_bytes

    def strides(self, num_blocks: int) -> tuple[int, ...]:
        """Return the strides of the cache tensor, in elements.

        Dimensions of size 1 get the stride that they would have at any other size.
        """
        shape = self.shape(num_blocks)
        strides = [0] * len(shape)
        step = 1
        for dim in reversed(self.stride_order()):
            strides[dim] = step
            step *= shape[dim]
        strides[0] = self.page_size_bytes // self.dtype.itemsize
        return tuple(strides)

    def allocate(
        self, num_blocks: int, device: torch.device | str, *, is_zeroed: bool = True
    ) -> torch.Tensor:
        """Return a cache of `num_blocks` blocks in this spec's shape and strides.

        Args:
            num_blocks: its blocks.
            device: where it lies.
            is_zeroed: fill it with zeros; else whoever takes a block has to, for tails of used
                blocks are finite. Memory of a host that nobody wrote to costs nothing.

        On a CPU it lies in large pages where the system gives them.

        Raises:
            InvalidRequestError: `num_blocks` is not positive.
        """
        require_positive("num_blocks", num_blocks)
        most = INT64_MOST // self.page_size_bytes
        if num_blocks > most:
            raise InvalidRequestError.for_field(
                "num_blocks", num_blocks, f"at most {most}, of {self.page_size_bytes} bytes each"
            )
        num_elements = num_blocks * self.page_size_bytes // self.dtype.itemsize
        flat = torch.empty(num_elements, dtype=self.dtype, device=device)
        advise_large_pages(flat)
        if is_zeroed:
            flat.zero_()
        return flat.as_strided(self.shape(num_blocks), self.strides(num_blocks))

    def check(self, kv_cache: torch.Tensor) -> None:
        """Refuse a tensor that is not a cache of this spec; its layout is free.

        Raises:
            InvalidInputError: dtype, shape or the last stride differ, or it is no tensor.
        """
        if not isinstance(kv_cache, torch.Tensor):
            raise InvalidInputError.for_argument(
                "kv_cache", f"a {type(kv_cache).__name__}", "a tensor, from `allocate`"
            )
        if kv_cache.dtype is not self.dtype:
            flavour = "an fp8 cache is read only in the flavour that it was written in."
            raise InvalidInputError.for_argument(
                "kv_cache dtype",
                dtype_name(kv_cache.dtype),
                f"{dtype_name(self.dtype)} (kv_cache_dtype={self.kv_cache_dtype!r})",
                hint=flavour if self.is_quantized else "allocate it with this spec.",
            )
        tail = self.shape(1)[1:]
        if kv_cache.shape[1:] != tail:
            raise InvalidInputError.for_argument(
                "kv_cache shape",
                tuple(kv_cache.shape),
                f"(num_blocks, {', '.join(map(str, tail))})",
                hint="allocate it with this spec.",
            )
        if kv_cache.stride(-1) != 1 and kv_cache.shape[-1] > 1:
            raise InvalidInputError.for_argument(
                "the last stride of kv_cache", kv_cache.stride(-1), "1, a dense last dimension"
            )
