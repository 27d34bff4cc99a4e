"""What a model asks of attention: everything that selection depends on, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import torch

from attn_shared._fields import (
    FLOAT32_LEAST,
    FLOAT32_MOST,
    CachedHash,
    member_of,
    require_bool,
    require_positive,
)
from attn_shared.dtypes import KVCacheLayout, dtype_name, parse_dtype, parse_kv_cache_dtype
from attn_shared.errors import InvalidRequestError

__all__ = [
    "AttentionRequest",
    "AttentionType",
    "MLADims",
    "Phase",
    "Window",
    "check_flash_attn_version",
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


def window_of(size: int | None, *, causal: bool = True) -> Window:
    """Return (left, right) of a sliding window of `size` keys, the query's own key included.

    A window of W keys is (W-1, 0) for causal rows and (W-1, W-1) for non-causal ones; None is no
    window.

    Raises:
        InvalidRequestError: `size` is not a positive number.
    """
    if size is None:
        return (None, None)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidRequestError.for_field(
            "window", size, "an int >= 1, the number of keys, or None for no window"
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
                require_positive(f"mla.{field.name}", value)

    @property
    def latent_size(self) -> int:
        """Width of one cache entry."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest(CachedHash):
    """All that selection depends on, per tensor-parallel rank.

    Attributes:
        num_heads: query heads of this rank (Hq).
        num_kv_heads: key/value heads of this rank (Hkv); Hq must be a multiple of it.
        head_size: width of one query and key head (D); for MLA the width of a cache entry.
        head_size_v: width of one value head (Dv); None means equal to `head_size`, or with `mla`
            the latent's width.
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
        flash_attn_version: the generation of FlashAttention to run, 2, 3 or 4; None leaves the
            choice. A backend that has no such versions does not serve a named one.
        dcp_size: ranks that one sequence's cache is sharded over at decode.
        pcp_size: ranks that one sequence's prefill is sharded over.
        phase: which part of serving this is for.

    Raises:
        InvalidRequestError: a value that no backend may accept; names field, value and what is
            allowed.
        UnknownNameError: a dtype, attn_type, phase or layout of no such name.
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
    flash_attn_version: int | None = None
    dcp_size: int = 1
    pcp_size: int = 1
    phase: Phase = Phase.MIXED

    def __post_init__(self) -> None:
        """Validate every field on its own, then what couples them."""
        for name in ("num_heads", "num_kv_heads", "head_size", "dcp_size", "pcp_size"):
            require_positive(name, getattr(self, name))
        for name in ("head_size_v", "block_size", "index_topk", "chunk_size"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        for name in _BOOLEANS:
            require_bool(name, getattr(self, name))
        check_window(self.window)
        check_softcap(self.softcap)
        check_flash_attn_version(self.flash_attn_version)
        self._accept_names()
        self._check_heads()
        if self.mla is not None:
            if not isinstance(self.mla, MLADims):
                raise InvalidRequestError.for_field("mla", self.mla, "MLADims, or None")
            self._check_mla(self.mla)
        if self.index_topk is not None and not self.use_sparse:
            raise InvalidRequestError.for_field(
                "index_topk", self.index_topk, "None without use_sparse"
            )

    __hash__ = CachedHash.__hash__

    def _accept_names(self) -> None:
        """Turn names into enum members and dtypes; refuse unknown ones."""
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        parse_kv_cache_dtype(self.kv_cache_dtype)
        object.__setattr__(self, "attn_type", member_of(AttentionType, "attn_type", self.attn_type))
        object.__setattr__(self, "phase", member_of(Phase, "phase", self.phase))
        if self.kv_layout is not None:
            layout = member_of(KVCacheLayout, "kv_layout", self.kv_layout)
            object.__setattr__(self, "kv_layout", layout)

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidRequestError.for_field(
                "num_kv_heads",
                self.num_kv_heads,
                f"a divisor of num_heads={self.num_heads}",
                hint="each kv head serves a whole number of query heads; both counts are per "
                "tensor-parallel rank.",
            )

    def _check_mla(self, mla: MLADims) -> None:
        """One latent serves all heads: the widths follow from `mla`."""
        expected = {
            "num_kv_heads": (1, "one latent serves all heads"),
            "head_size": (mla.latent_size, "kv_lora_rank + qk_rope_head_dim"),
            "head_size_v": (mla.kv_lora_rank, "kv_lora_rank; None means the same"),
        }
        for field, (size, meaning) in expected.items():
            if getattr(self, field) not in (size, None):
                raise InvalidRequestError.for_field(
                    field, getattr(self, field), f"{size} with mla ({meaning})"
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
        require_positive("total_num_kv_heads", total_num_kv_heads)
        require_positive("tp_size", tp_size)
        if total_num_heads % tp_size:
            raise InvalidRequestError.for_field(
                "tp_size", tp_size, f"a divisor of total_num_heads={total_num_heads}"
            )
        if total_num_kv_heads % tp_size and tp_size % total_num_kv_heads:
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
        if self.head_size_v is not None:
            return self.head_size_v
        return self.head_size if self.mla is None else self.mla.kv_lora_rank

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def use_mla(self) -> bool:
        """Whether the cache holds latents."""
        return self.mla is not None

    @property
    def is_causal(self) -> bool:
        """Whether the causal mask holds for every row."""
        is_decoder = self.attn_type is AttentionType.DECODER
        return is_decoder and not self.non_causal and not self.per_request_causal

    @property
    def has_right_window(self) -> bool:
        """Whether the window hides keys to the right, which the causal mask hides otherwise."""
        return self.window[1] is not None and not self.is_causal

    @property
    def has_window(self) -> bool:
        """Whether the window hides keys that would be visible without it."""
        return self.window[0] is not None or self.has_right_window

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
        for name in ("attn_type", "phase"):
            result[name] = str(result[name])
        result["kv_layout"] = None if self.kv_layout is None else str(self.kv_layout)
        result["dtype"] = dtype_name(self.dtype)
        result["window"] = list(self.window)
        if self.mla is not None:
            result["mla"] = {f.name: getattr(self.mla, f.name) for f in fields(self.mla)}
        return result


_BOOLEANS = tuple(field.name for field in fields(AttentionRequest) if field.default is False)


def check_window(window: Window) -> None:
    """Refuse a window that is not two counts of keys (or None).

    Raises:
        InvalidRequestError: it is no pair, or a side is negative or not an int.
    """
    if isinstance(window, tuple) and len(window) == 2 and all(map(_is_side, window)):
        return
    raise InvalidRequestError.for_field(
        "window",
        window,
        "a tuple (left, right), each an int >= 0 of keys beside the query's own, or None",
        hint="a sliding window of W keys that includes the query's own is window_of(W).",
    )


def _is_side(side: object) -> bool:
    return side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= 0)


def check_softcap(softcap: float | None) -> None:
    """Refuse a softcap that is not a positive number of float32, which kernels take it as.

    Raises:
        InvalidRequestError: as said.
    """
    if softcap is None:
        return
    is_number = isinstance(softcap, float | int) and not isinstance(softcap, bool)
    if not (is_number and FLOAT32_LEAST <= softcap <= FLOAT32_MOST):
        raise InvalidRequestError.for_field(
            "softcap", softcap, "a positive finite number in float32, or None for off"
        )


def check_flash_attn_version(version: int | None) -> None:
    """Refuse a generation of FlashAttention that does not exist.

    Raises:
        InvalidRequestError: as said.
    """
    if version is None or (isinstance(version, int) and version in (2, 3, 4)):
        return
    raise InvalidRequestError.for_field(
        "flash_attn_version", version, "2, 3 or 4, or None to leave the choice"
    )
