"""What a backend can do, as data, and the pure check of a request against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import torch

from attn_shared.device import DeviceCapability, DeviceFacts, Vendor
from attn_shared.dtypes import KVCacheLayout, dtype_name
from attn_shared.request import AttentionRequest, AttentionType, Phase

__all__ = [
    "Capability",
    "DeviceLimit",
    "MultipleOf",
    "Reason",
    "Rule",
    "SizeSet",
    "Support",
]


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """In a list of block sizes: every multiple of `base`."""

    base: int

    def __str__(self) -> str:
        """Read as "multiple of 16"."""
        return f"multiple of {self.base}"


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

    def to_dict(self) -> dict[str, str]:
        """Return JSON-safe values."""
        return {
            "code": self.code,
            "value": self.value,
            "allowed": self.allowed,
            "hint": self.hint,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSet:
    """A set of sizes: listed ones, or a range with a step."""

    sizes: frozenset[int] | None = None
    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1

    @classmethod
    def of(cls, *sizes: int) -> SizeSet:
        """Return the set of exactly these sizes."""
        return cls(sizes=frozenset(sizes))

    def __contains__(self, size: int) -> bool:
        """Whether `size` is in the set."""
        if self.sizes is not None:
            return size in self.sizes
        is_in_range = self.minimum <= size and (self.maximum is None or size <= self.maximum)
        return is_in_range and size % self.multiple_of == 0

    def __str__(self) -> str:
        """Read as "64, 128" or "8 to 256 in steps of 8"."""
        if self.sizes is not None:
            return ", ".join(str(size) for size in sorted(self.sizes))
        end = "or more" if self.maximum is None else f"to {self.maximum}"
        step = f", multiple of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.minimum} {end}{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimit:
    """Devices of one vendor that a backend runs on; None is no limit of that kind.

    `at_least` orders capabilities, `families` takes major numbers, `exact` takes whole
    capabilities and `archs` canonical names: four predicates, never one number for all.
    """

    vendor: Vendor
    at_least: tuple[int, int] | None = None
    below: tuple[int, int] | None = None
    families: tuple[int, ...] | None = None
    exact: tuple[tuple[int, int], ...] | None = None
    archs: tuple[str, ...] | None = None
    isa: tuple[str, ...] = ()

    def admits(self, device: DeviceFacts) -> bool:
        """Whether the device fulfils every part of this limit."""
        return (
            device.vendor is self.vendor
            and (self.archs is None or device.arch in self.archs)
            and all(device.has_isa(level) for level in self.isa)
            and self._admits_capability(device.capability)
        )

    def _admits_capability(self, capability: DeviceCapability | None) -> bool:
        limits = (self.at_least, self.below, self.families, self.exact)
        if all(limit is None for limit in limits):
            return True
        if capability is None:
            return False
        return (
            (self.at_least is None or capability.at_least(*self.at_least))
            and (self.below is None or not capability.at_least(*self.below))
            and (self.families is None or any(capability.is_family(m) for m in self.families))
            and (self.exact is None or any(capability.is_exactly(*pair) for pair in self.exact))
        )

    def __str__(self) -> str:
        """Read as "nvidia >= 8.0"."""
        parts = [str(self.vendor)]
        if self.at_least is not None:
            parts.append(">= {}.{}".format(*self.at_least))
        if self.below is not None:
            parts.append("< {}.{}".format(*self.below))
        if self.families is not None:
            parts.append("family " + "/".join(f"{major}.x" for major in self.families))
        if self.exact is not None:
            parts.append("exactly " + "/".join("{}.{}".format(*pair) for pair in self.exact))
        if self.archs is not None:
            parts.append("/".join(self.archs))
        if self.isa:
            parts.append("with " + "+".join(self.isa))
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A named pure check of what couples several fields; returns None where it has no objection."""

    name: str
    check: Callable[[AttentionRequest, DeviceFacts], Reason | None]


# The features of a request that are served or not: (code, field of Capability, asked for by).
_FEATURES: tuple[tuple[str, str, Callable[[AttentionRequest], object]], ...] = (
    ("sink", "sinks", lambda r: r.has_sinks),
    ("window", "window", lambda r: r.has_window and not _is_two_sided(r)),
    ("two_sided_window", "two_sided_window", lambda r: r.has_window and _is_two_sided(r)),
    ("chunked_local", "chunked_local", lambda r: r.chunk_size is not None),
    ("softcap", "softcap", lambda r: r.softcap is not None),
    ("alibi", "alibi", lambda r: r.has_alibi),
    ("non_causal", "non_causal", lambda r: r.non_causal),
    ("per_request_causal", "per_request_causal", lambda r: r.per_request_causal),
    ("mm_prefix", "mm_prefix", lambda r: r.use_mm_prefix),
    ("batch_invariance", "batch_invariant", lambda r: r.batch_invariant),
    ("kv_connector", "kv_connector", lambda r: r.use_kv_connector),
    ("per_head_quant_scales", "per_head_quant_scales", lambda r: r.per_head_quant_scales),
    ("lse", "lse", lambda r: r.needs_lse),
    ("dcp", "dcp", lambda r: r.dcp_size > 1),
    ("pcp", "pcp", lambda r: r.pcp_size > 1),
)


def _is_two_sided(request: AttentionRequest) -> bool:
    return request.window[1] not in (None, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a backend can do on one device with one set of libraries.

    Every feature defaults to "unsupported", so that a field added later admits nobody by
    accident.

    Attributes:
        devices: limits of which at least one must admit the device.
        dtypes: compute dtypes.
        head_sizes: widths of query and key heads.
        kv_cache_dtypes: names of cache formats; "auto" must be listed to be taken.
        head_sizes_v: widths of value heads where they differ from D; None: they must be equal.
        block_sizes: a block is taken if it is a multiple of any one entry; empty: cache-free only.
        preferred_block_size: the block taken when the caller leaves it open.
        max_block_size: the largest block, or None.
        attn_types: kinds of attention.
        phases: parts of serving.
        kv_layouts: cache layouts, preferred first.
        is_mla, is_sparse: must equal what the request asks.
        reads_fresh_kv: the step's new tokens are read unquantised.
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
    block_sizes: tuple[int | MultipleOf, ...] = ()
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
    dcp: Support = Support.NO
    pcp: Support = Support.NO
    reads_fresh_kv: bool = False
    tolerates_nan_tail: bool = False
    needs_exact_host_lengths: bool = False
    counts_short_extends_as_decodes: bool = False
    rules: tuple[Rule, ...] = ()
    needs_probe: tuple[str, ...] = ()

    def check(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Reason, ...]:
        """Return every reason to refuse the request, in a fixed order; empty means it is served."""
        found: list[Reason | None] = [
            self._check_device(device),
            self._check_head_size(request),
            self._check_head_size_v(request),
            _check_member("dtype", dtype_name(request.dtype), map(dtype_name, self.dtypes)),
            self._check_kv_cache_dtype(request),
            self._check_block_size(request),
            self._check_kv_layout(request),
            *self._check_kind(request),
            _check_member("attn_type", str(request.attn_type), map(str, self.attn_types)),
            _check_member("phase", str(request.phase), map(str, self.phases)),
            *(self._check_feature(request, *feature) for feature in _FEATURES),
            *(rule.check(request, device) for rule in self.rules),
        ]
        return tuple(reason for reason in found if reason is not None)

    def slow_features(self, request: AttentionRequest) -> tuple[str, ...]:
        """Return codes of features that the request asks for and only a slow path serves."""
        return tuple(
            code
            for code, field, is_asked in _FEATURES
            if getattr(self, field) is Support.SLOW and is_asked(request)
        )

    def accepts_block_size(self, block_size: int) -> bool:
        """Whether a block of this many tokens is a multiple of a listed size and not too large."""
        if self.max_block_size is not None and block_size > self.max_block_size:
            return False
        return any(block_size % _base(size) == 0 for size in self.block_sizes)

    def block_size_for(self, default: int | None = None) -> int:
        """Return `default` if it is accepted, else the preferred block size."""
        if default is not None and self.accepts_block_size(default):
            return default
        return self.preferred_block_size

    def _check_device(self, device: DeviceFacts) -> Reason | None:
        if any(limit.admits(device) for limit in self.devices):
            return None
        capability = f" ({device.capability})" if device.capability else ""
        return Reason(
            code="capability",
            value=f"{device.vendor} {device.arch}{capability}",
            allowed="; ".join(str(limit) for limit in self.devices) or "no device",
        )

    def _check_head_size(self, request: AttentionRequest) -> Reason | None:
        if request.head_size in self.head_sizes:
            return None
        return Reason(
            code="head_size", value=str(request.head_size), allowed=str(self.head_sizes)
        )

    def _check_head_size_v(self, request: AttentionRequest) -> Reason | None:
        if request.use_mla or request.value_size == request.head_size:
            return None
        if self.head_sizes_v is not None and request.value_size in self.head_sizes_v:
            return None
        allowed = f"equal to head_size={request.head_size}"
        if self.head_sizes_v is not None:
            allowed = f"{allowed}, or {self.head_sizes_v}"
        return Reason(code="head_size_v", value=str(request.value_size), allowed=allowed)

    def _check_kv_cache_dtype(self, request: AttentionRequest) -> Reason | None:
        if request.is_cache_free and request.kv_cache_dtype == "auto":
            return None
        return _check_member("kv_cache_dtype", request.kv_cache_dtype, self.kv_cache_dtypes)

    def _check_block_size(self, request: AttentionRequest) -> Reason | None:
        size = request.block_size
        if size is None or request.is_cache_free or self.accepts_block_size(size):
            return None
        allowed = " or ".join(
            str(entry) if isinstance(entry, MultipleOf) else f"multiple of {entry}"
            for entry in self.block_sizes
        )
        if self.max_block_size is not None:
            allowed += f", at most {self.max_block_size}"
        return Reason(
            code="block_size",
            value=str(size),
            allowed=allowed or "none: this backend reads no paged cache",
            hint=f"leave it open to get {self.preferred_block_size}.",
        )

    def _check_kv_layout(self, request: AttentionRequest) -> Reason | None:
        if request.kv_layout is None:
            return None
        return _check_member("kv_layout", str(request.kv_layout), map(str, self.kv_layouts))

    def _check_kind(self, request: AttentionRequest) -> Iterable[Reason | None]:
        """MLA and sparse backends serve their own kind only, and others never serve it."""
        yield _check_equal("mla", request.use_mla, self.is_mla)
        yield _check_equal("sparse", request.use_sparse, self.is_sparse)

    def _check_feature(
        self,
        request: AttentionRequest,
        code: str,
        field: str,
        is_asked: Callable[[AttentionRequest], object],
    ) -> Reason | None:
        if not is_asked(request) or getattr(self, field) is not Support.NO:
            return None
        return Reason(code=code, value=_FEATURE_VALUES.get(code, _yes)(request), allowed="not set")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values of what a reader may ask; rules by name."""
        return {
            "devices": [str(limit) for limit in self.devices],
            "dtypes": sorted(map(dtype_name, self.dtypes)),
            "kv_cache_dtypes": sorted(self.kv_cache_dtypes),
            "head_sizes": str(self.head_sizes),
            "head_sizes_v": None if self.head_sizes_v is None else str(self.head_sizes_v),
            "block_sizes": [str(size) for size in self.block_sizes],
            "preferred_block_size": self.preferred_block_size,
            "attn_types": sorted(map(str, self.attn_types)),
            "phases": sorted(map(str, self.phases)),
            "kv_layouts": [str(layout) for layout in self.kv_layouts],
            "is_mla": self.is_mla,
            "is_sparse": self.is_sparse,
            "features": {
                code: getattr(self, field).name.lower() for code, field, _ in _FEATURES
            },
            "rules": [rule.name for rule in self.rules],
        }


def _yes(_request: AttentionRequest) -> str:
    return "True"


_FEATURE_VALUES: dict[str, Callable[[AttentionRequest], str]] = {
    "window": lambda r: str(r.window),
    "two_sided_window": lambda r: str(r.window),
    "chunked_local": lambda r: str(r.chunk_size),
    "softcap": lambda r: str(r.softcap),
    "dcp": lambda r: str(r.dcp_size),
    "pcp": lambda r: str(r.pcp_size),
}


def _base(size: int | MultipleOf) -> int:
    return size.base if isinstance(size, MultipleOf) else size


def _check_member(code: str, value: str, allowed: Iterable[str]) -> Reason | None:
    names = sorted(allowed)
    if value in names:
        return None
    return Reason(code=code, value=value, allowed=", ".join(names))


def _check_equal(kind: Literal["mla", "sparse"], is_asked: bool, is_served: bool) -> Reason | None:
    """The codes tell the two directions apart: `mla_requested` and `mla_only`."""
    if is_asked == is_served:
        return None
    code = f"{kind}_requested" if is_asked else f"{kind}_only"
    return Reason(code=code, value=f"use_{kind}={is_asked}", allowed=f"use_{kind}={is_served}")
