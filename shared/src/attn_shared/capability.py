"""What a backend can do, as data, and the pure check of a request against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from attn_shared._dcp_rules import Objection, dcp_objections, pcp_objections
from attn_shared.device import DeviceFacts
from attn_shared.dtypes import KVCacheLayout, dtype_name
from attn_shared.limits import (
    BlockSize,
    DeviceLimit,
    Exactly,
    MultipleOf,
    SizeSet,
    admits_block,
    describe_blocks,
)
from attn_shared.request import AttentionRequest, AttentionType, Phase

__all__ = [
    "Capability",
    "DeviceLimit",
    "Exactly",
    "MultipleOf",
    "Reason",
    "Rule",
    "SizeSet",
    "Support",
]


class Support(IntEnum):
    """How a feature is served. SLOW is right but not by the backend's fast kernel."""

    NO = 0
    SLOW = 1
    YES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a request is refused: which rule, the value asked for, what is allowed, what to do."""

    code: str
    value: str
    allowed: str
    hint: str = ""

    def __str__(self) -> str:
        """Read as one sentence."""
        text = f"{self.code}={self.value} (allowed: {self.allowed})"
        return f"{text}; {self.hint}" if self.hint else text

    def step(self) -> str:
        """Say what would have to be otherwise."""
        text = f"{self.code} {self.allowed} instead of {self.value}"
        return f"{text} ({self.hint})" if self.hint else text

    def to_dict(self) -> dict[str, str]:
        """Return JSON-safe values."""
        return {
            "code": self.code,
            "value": self.value,
            "allowed": self.allowed,
            "hint": self.hint,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A named pure check of what couples several fields; returns None where it has no objection."""

    name: str
    check: Callable[[AttentionRequest, DeviceFacts], Reason | None]


class _Feature(NamedTuple):
    """Something that a request asks for or not, and that a backend serves or not.

    `field` is the capability's, `value` what the request says, `neutral` what it says when it does
    not ask.
    """

    code: str
    field: str
    is_asked: Callable[[AttentionRequest], bool]
    value: Callable[[AttentionRequest], object]
    neutral: str


def _flag(code: str, field: str, is_asked: Callable[[AttentionRequest], bool]) -> _Feature:
    return _Feature(code, field, is_asked, is_asked, "False")


# A right-bounded window asks for two things, so that no request gains a backend by asking more.
_FEATURES = (
    _flag("sink", "sinks", lambda r: r.has_sinks),
    _Feature("window", "window", lambda r: r.has_window, lambda r: r.window, "no window"),
    _Feature(
        "two_sided_window",
        "two_sided_window",
        lambda r: r.has_right_window,
        lambda r: r.window,
        "no bound to the right of rows without a causal mask",
    ),
    _Feature(
        "chunked_local",
        "chunked_local",
        lambda r: r.chunk_size is not None,
        lambda r: r.chunk_size,
        "None",
    ),
    _Feature("softcap", "softcap", lambda r: r.softcap is not None, lambda r: r.softcap, "None"),
    _flag("alibi", "alibi", lambda r: r.has_alibi),
    _flag("non_causal", "non_causal", lambda r: r.non_causal),
    _flag("per_request_causal", "per_request_causal", lambda r: r.per_request_causal),
    _flag("mm_prefix", "mm_prefix", lambda r: r.use_mm_prefix),
    _flag("batch_invariance", "batch_invariant", lambda r: r.batch_invariant),
    _flag("kv_connector", "kv_connector", lambda r: r.use_kv_connector),
    _flag("per_head_quant_scales", "per_head_quant_scales", lambda r: r.per_head_quant_scales),
    _flag("lse", "lse", lambda r: r.needs_lse),
    _Feature(
        "flash_attn_version",
        "flash_attn_version",
        lambda r: r.flash_attn_version is not None,
        lambda r: r.flash_attn_version,
        "None",
    ),
    _Feature("dcp", "dcp", lambda r: r.dcp_size > 1, lambda r: r.dcp_size, "1"),
    _Feature("pcp", "pcp", lambda r: r.pcp_size > 1, lambda r: r.pcp_size, "1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a backend can do on one device with one set of libraries.

    Every feature defaults to "unsupported", so that a field added later admits nobody by
    accident.

    Attributes:
        devices: limits of which at least one must admit the device.
        dtypes: compute dtypes.
        head_sizes: widths of query and key heads.
        kv_cache_dtypes: names of cache formats. "auto" also admits the name of the compute dtype,
            which is the same format; nothing else is implied.
        head_sizes_v: widths of value heads where they differ from D; None: they must be equal.
        block_sizes: a block is taken if any one entry admits it, which an `Exactly` does for itself
            and every other for its multiples; empty: cache-free only.
        preferred_block_size: the block taken when the caller leaves it open.
        max_block_size: the largest block, or None.
        attn_types: kinds of attention.
        phases: parts of serving; MIXED implies the others.
        kv_layouts: cache layouts, preferred first.
        is_mla, is_sparse: must equal what the request asks.
        sinks: one extra logit per head.
        window: a window that hides keys to the left.
        two_sided_window: one that hides keys to the right of rows without a causal mask as well.
        chunked_local: chunked local attention.
        softcap: a cap on the logits.
        alibi: a linear bias per head.
        non_causal: decoder rows without a causal mask.
        per_request_causal: causality as a tensor of one entry per request.
        mm_prefix: multimodal ranges.
        batch_invariant: results do not depend on what shares the batch.
        kv_connector: another party reads and writes cache blocks.
        per_head_quant_scales: scales of a quantised cache per head.
        lse: the logarithm of the softmax's denominator is returned.
        flash_attn_version: a generation of FlashAttention may be named.
        dcp: the cache may be sharded over ranks: the backend attends to a rank's own keys as to
            any others, and `Attention` combines the ranks by their LSE.
        pcp: the step's tokens may be split over ranks: each attends for its own.
        reads_fresh_kv: the step's new tokens are read unquantised.
        fp8_products: with an fp8 cache query and P are rounded to its dtype as well, by `q_scale`;
            the yardstick of accuracy then rounds alike.
        tolerates_nan_tail: slots past seq_len in a used block may hold NaN.
        needs_exact_host_lengths: `build` needs exact lengths on the host.
        counts_short_extends_as_decodes: how its builder splits a batch.
        rules: checks of what couples several fields.
        needs_probe: libraries whose build must be known before this record can be trusted.
    """

    devices: tuple[DeviceLimit, ...]
    dtypes: frozenset[torch.dtype]
    head_sizes: SizeSet
    kv_cache_dtypes: frozenset[str] = frozenset({"auto"})
    head_sizes_v: SizeSet | None = None
    block_sizes: tuple[BlockSize, ...] = ()
    preferred_block_size: int = 16
    max_block_size: int | None = None
    attn_types: frozenset[AttentionType] = frozenset({AttentionType.DECODER})
    phases: frozenset[Phase] = frozenset(Phase)
    kv_layouts: tuple[KVCacheLayout, ...] = (KVCacheLayout.NHD,)
    is_mla: bool = False
    is_sparse: bool = False
    sinks: Support = Support.NO
    window: Support = Support.NO
    two_sided_window: Support = Support.NO
    chunked_local: Support = Support.NO
    softcap: Support = Support.NO
    alibi: Support = Support.NO
    non_causal: Support = Support.NO
    per_request_causal: Support = Support.NO
    mm_prefix: Support = Support.NO
    batch_invariant: Support = Support.NO
    kv_connector: Support = Support.NO
    per_head_quant_scales: Support = Support.NO
    lse: Support = Support.NO
    flash_attn_version: Support = Support.NO
    dcp: Support = Support.NO
    pcp: Support = Support.NO
    reads_fresh_kv: bool = False
    fp8_products: bool = False
    tolerates_nan_tail: bool = False
    needs_exact_host_lengths: bool = False
    counts_short_extends_as_decodes: bool = False
    rules: tuple[Rule, ...] = ()
    needs_probe: tuple[str, ...] = ()

    def check(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Reason, ...]:
        """Return every reason to refuse the request, in a fixed order; empty means it is served."""
        found = (
            self._check_device(device),
            self._check_head_size(request),
            self._check_head_size_v(request),
            _check_member("dtype", dtype_name(request.dtype), map(dtype_name, self.dtypes)),
            *self._check_cache(request),
            _check_equal("mla", request.use_mla, self.is_mla),
            _check_equal("sparse", request.use_sparse, self.is_sparse),
            _check_member("attn_type", str(request.attn_type), map(str, self.attn_types)),
            self._check_phase(request),
            *(self._check_feature(request, feature) for feature in _FEATURES),
            self._check_shard_lse(request),
            *map(_reason, dcp_objections(request)),
            *map(_reason, pcp_objections(request)),
            *(rule.check(request, device) for rule in self.rules),
        )
        return tuple(reason for reason in found if reason is not None)

    def admits(self, device: DeviceFacts) -> bool:
        """Whether the backend runs on the device at all."""
        return any(limit.admits(device) for limit in self.devices)

    def slow_features(self, request: AttentionRequest) -> tuple[str, ...]:
        """Return codes of features that the request asks for and only a slow path serves."""
        return tuple(
            feature.code
            for feature in _FEATURES
            if getattr(self, feature.field) is Support.SLOW and feature.is_asked(request)
        )

    def accepts_block_size(self, block_size: int) -> bool:
        """Whether a block of this many tokens is of a listed size and not too large."""
        if self.max_block_size is not None and block_size > self.max_block_size:
            return False
        return any(admits_block(entry, block_size) for entry in self.block_sizes)

    def block_size_for(self, default: int | None = None) -> int:
        """Return `default` if it is accepted, else the preferred block size."""
        if default is not None and self.accepts_block_size(default):
            return default
        return self.preferred_block_size

    def layout_for(self, request: AttentionRequest) -> KVCacheLayout | None:
        """Return the layout that the request's cache gets; None where there is no cache."""
        if request.is_cache_free:
            return None
        return request.kv_layout or self.kv_layouts[0]

    def _check_device(self, device: DeviceFacts) -> Reason | None:
        if self.admits(device):
            return None
        capability = f" ({device.capability})" if device.capability else ""
        return Reason(
            code="device",
            value=f"{device.vendor} {device.arch}{capability}",
            allowed="; ".join(str(limit) for limit in self.devices) or "none",
        )

    def _check_head_size(self, request: AttentionRequest) -> Reason | None:
        if request.head_size in self.head_sizes:
            return None
        return Reason(code="head_size", value=str(request.head_size), allowed=str(self.head_sizes))

    def _check_head_size_v(self, request: AttentionRequest) -> Reason | None:
        if request.use_mla or request.value_size == request.head_size:
            return None
        if self.head_sizes_v is not None and request.value_size in self.head_sizes_v:
            return None
        allowed = f"{request.head_size}, as head_size"
        if self.head_sizes_v is not None:
            allowed = f"{allowed}, or {self.head_sizes_v}"
        return Reason(code="head_size_v", value=str(request.value_size), allowed=allowed)

    def _check_cache(self, request: AttentionRequest) -> Iterable[Reason | None]:
        """A cache-free request has no cache to object to, unless it names a format for one."""
        if not request.is_cache_free:
            yield self._check_block_size(request)
            yield self._check_kv_layout(request)
        if not (request.is_cache_free and request.kv_cache_dtype == "auto"):
            yield self._check_kv_cache_dtype(request)

    def _check_kv_cache_dtype(self, request: AttentionRequest) -> Reason | None:
        is_plain = request.kv_cache_dtype == dtype_name(request.dtype)
        if is_plain and "auto" in self.kv_cache_dtypes:
            return None
        return _check_member("kv_cache_dtype", request.kv_cache_dtype, self.kv_cache_dtypes)

    def _check_block_size(self, request: AttentionRequest) -> Reason | None:
        if not self.block_sizes:
            allowed = "none: this backend reads no paged cache"
            return Reason(code="block_size", value=str(request.block_size), allowed=allowed)
        if request.block_size is None or self.accepts_block_size(request.block_size):
            return None
        allowed = describe_blocks(self.block_sizes)
        if self.max_block_size is not None:
            allowed += f", at most {self.max_block_size}"
        return Reason(
            code="block_size",
            value=str(request.block_size),
            allowed=allowed,
            hint=f"leave it open to get {self.preferred_block_size}",
        )

    def _check_kv_layout(self, request: AttentionRequest) -> Reason | None:
        if request.kv_layout is None:
            return None
        return _check_member("kv_layout", str(request.kv_layout), map(str, self.kv_layouts))

    def _check_phase(self, request: AttentionRequest) -> Reason | None:
        if Phase.MIXED in self.phases:
            return None
        return _check_member("phase", str(request.phase), map(str, self.phases))

    def _check_feature(self, request: AttentionRequest, feature: _Feature) -> Reason | None:
        if getattr(self, feature.field) is not Support.NO or not feature.is_asked(request):
            return None
        return Reason(code=feature.code, value=str(feature.value(request)), allowed=feature.neutral)

    def _check_shard_lse(self, request: AttentionRequest) -> Reason | None:
        """Ranks that share a sequence combine their partial results by the LSE."""
        if request.dcp_size == 1 or self.dcp is Support.NO or self.lse is not Support.NO:
            return None
        allowed = f"a backend that returns its LSE, with dcp_size={request.dcp_size}"
        return Reason(code="dcp_lse", value="False", allowed=allowed)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values of what a reader may ask; rules by name."""
        return {
            "devices": [str(limit) for limit in self.devices],
            "dtypes": sorted(map(dtype_name, self.dtypes)),
            "kv_cache_dtypes": sorted(self.kv_cache_dtypes),
            "head_sizes": str(self.head_sizes),
            "head_sizes_v": None if self.head_sizes_v is None else str(self.head_sizes_v),
            "block_sizes": [
                str(MultipleOf(size) if isinstance(size, int) else size)
                for size in self.block_sizes
            ],
            "preferred_block_size": self.preferred_block_size,
            "max_block_size": self.max_block_size,
            "attn_types": sorted(map(str, self.attn_types)),
            "phases": sorted(map(str, self.phases)),
            "kv_layouts": [str(layout) for layout in self.kv_layouts],
            "is_mla": self.is_mla,
            "is_sparse": self.is_sparse,
            "features": {
                feature.code: getattr(self, feature.field).name.lower() for feature in _FEATURES
            },
            "rules": [rule.name for rule in self.rules],
        }


def _reason(objection: Objection) -> Reason:
    return Reason(code=objection.code, value=objection.value, allowed=objection.allowed)


def _check_member(code: str, value: str, allowed: Iterable[str]) -> Reason | None:
    names = sorted(allowed)
    if value in names:
        return None
    return Reason(code=code, value=value, allowed=", ".join(names))


def _check_equal(code: str, is_asked: bool, is_served: bool) -> Reason | None:
    """A kind of attention that a backend either is for, or never serves."""
    if is_asked == is_served:
        return None
    return Reason(code=code, value=str(is_asked), allowed=str(is_served))
