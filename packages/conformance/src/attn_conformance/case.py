"""A batch in words: plain data that prints itself, from which tensors are made anew every time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import torch

from attn_shared.dtypes import KVCacheLayout, dtype_name
from attn_shared.request import AttentionRequest, AttentionType, MLADims, Phase, Window

__all__ = ["Case", "TableStyle"]

Scale = float | tuple[float, ...]
"""Of a quantised cache: per tensor, or one number per kv head."""


class TableStyle(StrEnum):
    """Which blocks the rows of a block table name."""

    SHUFFLED = "shuffled"
    """Every row has blocks of its own, scattered over the cache; block 0 may be anyone's."""
    ORDERED = "ordered"
    """Blocks 0, 1, 2, ... in the order of the rows: block 0 is the first row's first."""
    SHARED_PREFIX = "shared_prefix"
    """All rows begin with the same blocks, as many as no row writes in this step."""
    REPEATED = "repeated"
    """Blocks that are not written in this step come from a pool of two, over and over."""
    FREED_LEFT = "freed_left"
    """Entries wholly left of the window all name one block that holds finite numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch of one layer, on which a rule is tried.

    Attributes:
        name: unique within its rule.
        query_lens: query tokens of each request.
        seq_lens: keys of each request: of the cache for decoders (the new tokens included; 0 is a
            padded row), of the encoder for cross-attention, of the call's own keys for encoders.
        num_heads: Hq.
        num_kv_heads: Hkv.
        head_size: D.
        head_size_v: Dv; None: equal to D.
        dtype: of query, key, value and output.
        kv_cache_dtype: the cache's format.
        fp8_e4m3_dtype: the flavour of an e4m3 cache; None: the device's, or else float8_e4m3fn.
        block_size: tokens per block.
        block_padding: elements between one cache block and the next.
        layout: order inside a block.
        attn_type: who attends to what.
        causal: for all requests, or one flag for each; decoders only.
        window: (left, right).
        chunk_size: of chunked local attention.
        softcap: None is off.
        has_sinks: one extra logit per head.
        has_alibi: a slope per head.
        mm_prefix_ranges: request -> ranges of absolute positions, both ends inclusive.
        k_scale: of stored keys.
        v_scale: of stored values.
        scale: factor on q.k; None: 1 / sqrt(D).
        query_factor: query rows are normal numbers times this; large ones give large logits.
        num_padding_rows: rows of query, key and value that follow the last request, all NaN.
        writes: the step's new tokens are handed over and written; else the cache has them already
            and key and value are None.
        table: which blocks the rows name.
        nan_tail: slots past seq_len in used blocks hold NaN instead of the largest number.
        cache_elements: the cache spans at least this many elements, sparsely, and the blocks in
            use lie at its end.
        common_prefix_len: handed to `build`: cascade attention over this prefix.
        is_prefilling: which prompts are not complete; None: not said.
        seq_lens_slack: host lengths are upper bounds, this much above the true ones.
        mla: widths of latent attention, whose cache has one entry per token; None: ordinary heads.
        batch_invariant: the mode in which results must not depend on the company.
        seed: of all random numbers.
        variant: what else a rule tells its cases apart by.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    head_size_v: int | None = None
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    fp8_e4m3_dtype: torch.dtype | None = None
    block_size: int = 4
    block_padding: int = 0
    layout: KVCacheLayout = KVCacheLayout.NHD
    attn_type: AttentionType = AttentionType.DECODER
    causal: bool | tuple[bool, ...] = True
    window: Window = (None, None)
    chunk_size: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    mm_prefix_ranges: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    scale: float | None = None
    query_factor: float = 1.0
    num_padding_rows: int = 0
    writes: bool = True
    table: TableStyle = TableStyle.SHUFFLED
    nan_tail: bool = False
    cache_elements: int = 0
    common_prefix_len: int = 0
    is_prefilling: tuple[bool, ...] | None = None
    seq_lens_slack: int = 0
    mla: MLADims | None = None
    batch_invariant: bool = False
    seed: int = 0
    variant: str = ""

    @property
    def request(self) -> AttentionRequest:
        """What the batch's layer asks of a backend."""
        is_decoder = self.attn_type is AttentionType.DECODER
        return AttentionRequest(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.block_size,
            kv_layout=self.layout,
            mla=self.mla,
            attn_type=self.attn_type,
            non_causal=is_decoder and self.causal is False,
            per_request_causal=not isinstance(self.causal, bool),
            use_mm_prefix=bool(self.mm_prefix_ranges),
            window=self.window,
            chunk_size=self.chunk_size,
            softcap=self.softcap,
            has_sinks=self.has_sinks,
            has_alibi=self.has_alibi,
            batch_invariant=self.batch_invariant,
            per_head_quant_scales=not (
                isinstance(self.k_scale, float) and isinstance(self.v_scale, float)
            ),
            phase=self.phase,
        )

    @property
    def phase(self) -> Phase:
        """Which part of serving such a batch belongs to."""
        if all(length <= 1 for length in self.query_lens):
            return Phase.DECODE
        if all(length > 1 for length in self.query_lens):
            return Phase.PREFILL
        return Phase.MIXED

    @property
    def value_size(self) -> int:
        """Dv."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def softmax_scale(self) -> float:
        """Factor on q.k."""
        if self.scale is not None:
            return self.scale
        if self.mla is not None:
            return float((self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim) ** -0.5)
        return float(self.head_size**-0.5)

    @property
    def num_tokens(self) -> int:
        """Query rows that belong to requests."""
        return sum(self.query_lens)

    @property
    def is_cache_free(self) -> bool:
        """Whether keys and values come with the call."""
        return self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

    @property
    def is_cross(self) -> bool:
        """Whether the keys are an encoder's, in a cache."""
        return self.attn_type is AttentionType.ENCODER_DECODER

    @property
    def computed_lens(self) -> tuple[int, ...]:
        """Keys of each request that the cache holds before this step's are written."""
        if not self.writes:
            return self.seq_lens
        if self.is_cross:
            return (0,) * len(self.seq_lens)
        pairs = zip(self.seq_lens, self.query_lens, strict=True)
        return tuple(max(0, length - new) for length, new in pairs)

    def with_fields(self, **changes: Any) -> Case:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        """Read as the constructor's call, with fields that are not at their default."""
        shown = [
            f"{item.name}={_words(getattr(self, item.name))}"
            for item in fields(self)
            if not _is_default(item, getattr(self, item.name))
        ]
        return f"Case({', '.join(shown)})"


def _is_default(item: Any, value: object) -> bool:
    if item.name == "mm_prefix_ranges":
        return not value
    return bool(value == item.default)


def _words(value: object) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return repr(str(value)) if isinstance(value, StrEnum) else repr(value)
