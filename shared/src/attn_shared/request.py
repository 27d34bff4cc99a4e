"""What a model asks of attention: everything that selection depends on, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import torch

from attn_shared.dtypes import KVCacheLayout, dtype_name, parse_dtype, parse_kv_cache_dtype
from attn_shared.errors import InvalidRequestError, UnknownNameError

__all__ = [
    "AttentionRequest",
    "AttentionType",
    "MLADims",
    "Phase",
    "Window",
    "check_softcap",
    "check_window",
    "window_of",
]

Window = tuple[int | None, int | None]
"""(left, right): how many keys on each side of the query's own position are visible; None is
unbounded, so (None, None) is no window."""


class AttentionType(StrEnum):
    """Who attends to what."""

    DECODER = "decoder"
    """Self-attention over a paged cache."""
    ENCODER = "encoder"
    """Self-attention of the encoder of an encoder-decoder model; no cache, full visibility."""
    ENCODER_ONLY = "encoder_only"
    """Self-attention of a model without a decoder; no cache, full visibility."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross-attention: decoder queries, the encoder's keys and values in a cache of their own."""


class Phase(StrEnum):
    """Which part of serving the backend is chosen for; MIXED must serve all of them."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


def window_of(size: int, *, causal: bool = True) -> Window:
    """Return (left, right) of a sliding window of `size` keys, the query's own key included.

    A window of W keys is (W-1, 0) for causal rows and (W-1, W-1) for non-causal ones.

    Raises:
        InvalidRequestError: `size` is not positive.
    """
    if size <= 0:
        raise InvalidRequestError.for_field(
            "window", size, "a positive number of keys, or None for no window"
        )
    return (size - 1, 0 if causal else size - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLADims:
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in elements.

    One cache entry is the latent (`kv_lora_rank`) followed by the rope part
    (`qk_rope_head_dim`): 512 + 64 for DeepSeek-V2 and V3.
    """

    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        """Refuse widths that are not positive."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _require_positive(f"mla.{field.name}", value)

    @property
    def latent_size(self) -> int:
        """Width of one cache entry."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """All that selection depends on, per tensor-parallel rank.

    Attributes:
        num_heads: query heads of this rank (Hq).
        num_kv_heads: key/value heads of this rank (Hkv); Hq must be a multiple of it.
        head_size: width of one query and key head (D); for MLA the width of a cache entry.
        head_size_v: width of one value head (Dv); None means equal to `head_size`.
        dtype: dtype of query, key, value and output.
        kv_cache_dtype: a name of `dtypes.KV_CACHE_DTYPES`.
        block_size: tokens per cache block, or None for the backend's preferred one.
        kv_layout: the layout that another party fixed, or None for the backend's preferred one.
        mla: widths of multi-head latent attention, or None for ordinary heads.
        use_sparse: the model attends to an indexer's selection of keys only.
        index_topk: how many keys that indexer selects.
        has_sinks: one extra logit per head enters the softmax's denominator.
        attn_type: who attends to what.
        non_causal: decoder rows see keys to their right as well.
        per_request_causal: causality differs between the requests of one batch.
        use_mm_prefix: multimodal ranges see each other in both directions.
        window: visible keys (left, right) of the query's own position.
        chunk_size: chunked local attention: a query sees its own chunk of this many keys only.
        softcap: logits become softcap * tanh(logits / softcap); None is off.
        has_alibi: a linear bias per head is added to the logits.
        batch_invariant: results must not depend on what shares the batch.
        use_kv_connector: another party reads or writes cache blocks (disaggregation, offload).
        per_head_quant_scales: scales of a quantised cache are per head, not per tensor.
        needs_lse: the caller wants the logarithm of the softmax's denominator.
        dcp_size: ranks that one sequence's cache is sharded over at decode.
        pcp_size: ranks that one sequence's prefill is sharded over.
        phase: which part of serving this is for.

    Raises:
        InvalidRequestError: a value that no backend may accept; names field, value and what is
            allowed.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    kv_layout: KVCacheLayout | None = None
    mla: MLADims | None = None
    use_sparse: bool = False
    index_topk: int | None = None
    has_sinks: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    non_causal: bool = False
    per_request_causal: bool = False
    use_mm_prefix: bool = False
    window: Window = (None, None)
    chunk_size: int | None = None
    softcap: float | None = None
    has_alibi: bool = False
    batch_invariant: bool = False
    use_kv_connector: bool = False
    per_head_quant_scales: bool = False
    needs_lse: bool = False
    dcp_size: int = 1
    pcp_size: int = 1
    phase: Phase = Phase.MIXED

    def __post_init__(self) -> None:
        """Validate every field on its own, then what couples them."""
        for name in ("num_heads", "num_kv_heads", "head_size", "dcp_size", "pcp_size"):
            _require_positive(name, getattr(self, name))
        for name in ("head_size_v", "block_size", "index_topk", "chunk_size"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        self._validate_enums()
        self._validate_heads()
        check_window(self.window)
        check_softcap(self.softcap)

    def _validate_enums(self) -> None:
        """Accept names for enums and dtypes; refuse the rest."""
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        parse_kv_cache_dtype(self.kv_cache_dtype)
        self._coerce("attn_type", AttentionType)
        self._coerce("phase", Phase)
        if self.kv_layout is not None:
            self._coerce("kv_layout", KVCacheLayout)

    def _coerce(self, field: str, kind: type[StrEnum]) -> None:
        value = getattr(self, field)
        if value not in list(kind):
            raise UnknownNameError.for_name(field, value, [str(member) for member in kind])
        object.__setattr__(self, field, kind(value))

    def _validate_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidRequestError.for_field(
                "num_kv_heads",
                self.num_kv_heads,
                f"a divisor of num_heads={self.num_heads}",
                hint="grouped-query attention needs a whole number of query heads per kv head; "
                "both counts are per tensor-parallel rank.",
            )
        if self.mla is not None and self.head_size != self.mla.latent_size:
            raise InvalidRequestError.for_field(
                "head_size",
                self.head_size,
                f"{self.mla.latent_size} (kv_lora_rank + qk_rope_head_dim) with mla",
            )

    @classmethod
    def for_rank(
        cls, *, total_num_heads: int, total_num_kv_heads: int, tp_size: int = 1, **options: Any
    ) -> AttentionRequest:
        """Build the request of one tensor-parallel rank from a model's totals.

        A rank has `total_num_heads // tp_size` query heads and
        `max(1, total_num_kv_heads // tp_size)` kv heads (kv heads are replicated when there are
        fewer than ranks). `options` are the other fields of the request.

        Raises:
            InvalidRequestError: the heads do not divide among the ranks.
        """
        _require_positive("tp_size", tp_size)
        if total_num_heads % tp_size:
            raise InvalidRequestError.for_field(
                "tp_size", tp_size, f"a divisor of total_num_heads={total_num_heads}"
            )
        larger, smaller = max(total_num_kv_heads, tp_size), min(total_num_kv_heads, tp_size)
        if smaller > 0 and larger % smaller:
            raise InvalidRequestError.for_field(
                "tp_size",
                tp_size,
                f"a divisor or a multiple of total_num_kv_heads={total_num_kv_heads}",
            )
        return cls(
            num_heads=total_num_heads // tp_size,
            num_kv_heads=max(1, total_num_kv_heads // tp_size),
            **options,
        )

    @property
    def value_size(self) -> int:
        """Width of one value head (Dv), with the default resolved."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def use_mla(self) -> bool:
        """Whether the cache holds latents."""
        return self.mla is not None

    @property
    def has_window(self) -> bool:
        """Whether either side is bounded in a way that the causal mask alone does not give."""
        return self.window[0] is not None or self.window[1] not in (None, 0)

    @property
    def is_cache_free(self) -> bool:
        """Whether keys and values come with the call instead of from a cache."""
        return self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

    def with_options(self, **changes: Any) -> AttentionRequest:
        """Return a copy with some fields changed, validated anew."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the request as JSON-safe values, every field present."""
        result: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        result["dtype"] = dtype_name(self.dtype)
        result["window"] = list(self.window)
        if self.mla is not None:
            result["mla"] = {f.name: getattr(self.mla, f.name) for f in fields(self.mla)}
        return result


def check_window(window: Window) -> None:
    """Refuse a window that is not two counts of keys (or None).

    Raises:
        InvalidRequestError: a side is negative or not an integer.
    """
    is_pair = isinstance(window, tuple) and len(window) == 2
    if not is_pair or any(
        side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0)
        for side in window
    ):
        raise InvalidRequestError.for_field(
            "window",
            window,
            "(left, right), each a count >= 0 of keys beside the query's own, or None",
            hint="a sliding window of W keys that includes the query's own is window_of(W).",
        )


def check_softcap(softcap: float | None) -> None:
    """Refuse a softcap that is zero, negative or not finite.

    Raises:
        InvalidRequestError: as said.
    """
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise InvalidRequestError.for_field(
            "softcap", softcap, "a positive finite number, or None for off"
        )


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise InvalidRequestError.for_field(name, value, "an integer >= 1")
