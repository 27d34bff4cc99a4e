"""Which build of FlashAttention runs a request: one answer for selection and for constructors.

A build is refused by what its kernels have for a device, and by what it was compiled with or takes
as arguments. Limits are those that the libraries check themselves: flash-attn 2.8.3,
tokenspeed-fa3 3.0.0.post20260810, vLLM 0.25.1 and flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attn_shared.capability import Reason
from attn_shared.device import DeviceFacts
from attn_shared.dtypes import dtype_name
from attn_shared.inventory import Inventory, VendorBuild, VendorEntry
from attn_shared.request import AttentionRequest

__all__ = [
    "LIBRARIES",
    "Provider",
    "Resolution",
    "libraries_for",
    "page_multiple",
    "resolve_provider",
]

HALVES = (torch.float16, torch.bfloat16)
E4M3_NAMES = ("fp8", "fp8_e4m3")

_HEAD_SIZE_MAX = 256
_MAX_SINK_HEADS = 64
_INVARIANT_PAGE_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Library:
    """What one library's kernels can do at best; its build may have less.

    Attributes:
        name: in the inventory.
        version: the generation of FlashAttention.
        majors: families of devices that it has kernels for.
        page_multiple: tokens per page are a multiple of it.
        writes_out: its call takes the output.
    """

    name: str
    version: int
    majors: tuple[int, ...]
    page_multiple: int = 16
    writes_out: bool = False


# FlashAttention 4 has kernels for 8.x and 12.x too, which read no pages.
_ALL_MAJORS = (8, 9, 10, 11, 12)
_LIBRARIES = (
    _Library(name="vllm_flash_attn_3", version=3, majors=(9,), writes_out=True),
    _Library(name="flash_attn_3", version=3, majors=(9,)),
    _Library(name="fa3_fwd", version=3, majors=(9,)),
    _Library(name="flash_attn_4", version=4, majors=(9, 10, 11)),
    _Library(name="vllm_flash_attn_2", version=2, majors=_ALL_MAJORS, writes_out=True),
    _Library(name="flash_attn", version=2, majors=_ALL_MAJORS, page_multiple=256),
)
LIBRARIES = tuple(library.name for library in _LIBRARIES)
"""All libraries by name, in the order in which they are taken within one generation."""

_VERSIONS = {9: (3, 4, 2), 10: (4, 2), 11: (2, 4)}
"""Generations in the order in which a family of devices takes them; (2,) for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """The build that runs a layer.

    Attributes:
        library: its name in the inventory.
        version: the generation of FlashAttention.
        release: of the library, where it is known.
        writes_out: its call takes the output.
        has_schedule: it schedules a step ahead of its layers.
    """

    library: str
    version: int
    release: str | None = None
    writes_out: bool = False
    has_schedule: bool = False

    def __str__(self) -> str:
        """Read as "FlashAttention 3 of vllm_flash_attn_3 0.25.1"."""
        release = f" {self.release}" if self.release else ""
        return f"FlashAttention {self.version} of {self.library}{release}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A provider, or the one reason why there is none."""

    provider: Provider | None = None
    reason: Reason | None = None


def libraries_for(device: DeviceFacts) -> tuple[str, ...]:
    """Return the libraries that have kernels for a device, the one that is taken first first."""
    return tuple(library.name for library in _ranked(device, None))


def page_multiple(device: DeviceFacts, inventory: Inventory) -> int:
    """Return what pages must be a multiple of, for the most permissive usable library."""
    usable = [
        library.page_multiple
        for library in _ranked(device, None)
        if inventory.get(library.name).is_usable and library.name != "fa3_fwd"
    ]
    return min(usable, default=16)


def resolve_provider(
    device: DeviceFacts, inventory: Inventory, request: AttentionRequest
) -> Resolution:
    """Return the build that serves a request on a device, or why none does.

    Pure. A library that is installed and not probed yet counts as complete.

    Args:
        device: where the kernels run.
        inventory: what is installed.
        request: what is asked; a named `flash_attn_version` is taken or refused, never replaced.
    """
    refused: list[_Refused] = []
    for library in _ranked(device, request.flash_attn_version):
        entry = inventory.get(library.name)
        objections = list(_objections(library, entry.build, device, request))
        if entry.is_usable and not objections:
            return Resolution(provider=_provider(library, entry))
        refused.append((library, entry, objections))
    return Resolution(reason=_refusal(device, inventory, request, refused))


def _ranked(device: DeviceFacts, version: int | None) -> list[_Library]:
    major = 0 if device.capability is None else device.capability.major
    versions = _VERSIONS.get(major, (2,)) if version is None else (version,)
    return [
        library
        for wanted in versions
        for library in _LIBRARIES
        if library.version == wanted and major in library.majors
    ]


def _provider(library: _Library, entry: VendorEntry) -> Provider:
    arguments = frozenset() if entry.build is None else entry.build.optional_arguments
    return Provider(
        library=library.name,
        version=library.version,
        release=entry.version,
        writes_out=library.writes_out or "fwd.out" in arguments,
        has_schedule=_SCHEDULED.get(library.name) in arguments,
    )


# By the argument that shows it. The Python function of flash_attn_3 takes a schedule too, and
# bounds the keys by the block table's width, where the schedule was made for the step's.
_SCHEDULED = {
    "flash_attn_3": "fwd.out",
    "vllm_flash_attn_3": "flash_attn_varlen_func.scheduler_metadata",
}

_Refused = tuple[_Library, VendorEntry, list[Reason]]
"""A library, what is known of it, and what it objects to."""


def _refusal(
    device: DeviceFacts, inventory: Inventory, request: AttentionRequest, refused: list[_Refused]
) -> Reason:
    """Sum up: what the usable builds object to, and what would mend it."""
    hint = "; ".join(
        entry.describe()
        for _, entry, why in refused
        if not entry.is_usable and not why and entry.install
    )
    met = [(entry.name, why) for _, entry, why in refused if why and entry.is_usable]
    if request.flash_attn_version is not None:
        found = met or [(entry.name, why) for _, entry, why in refused if why]
        return _named_refusal(device, request.flash_attn_version, found, hint)
    if not met:
        return _no_build(device, inventory, hint)
    first = met[0][1][0]
    allowed = " | ".join(
        f"{name}: {why[0].allowed if why[0].code == first.code else why[0]}" for name, why in met
    )
    return Reason(code=first.code, value=first.value, allowed=allowed, hint=hint or first.hint)


def _named_refusal(
    device: DeviceFacts, version: int, met: list[tuple[str, list[Reason]]], hint: str
) -> Reason:
    versions = sorted({library.version for library in _ranked(device, None)})
    served = f"{', '.join(map(str, versions)) or 'none'} on {device.arch}"
    words = [f"{name}: {'; '.join(map(str, why))}" for name, why in met]
    allowed = " | ".join([served, *words])
    return Reason(code="flash_attn_version", value=str(version), allowed=allowed, hint=hint)


def _no_build(device: DeviceFacts, inventory: Inventory, hint: str) -> Reason:
    """Say that nothing usable is for this device, and for which devices the rest is."""
    here = [item for item in _LIBRARIES if inventory.get(item.name).is_usable]
    families = [f"{item.name}: {', '.join(f'{major}.x' for major in item.majors)}" for item in here]
    allowed = " | ".join(families) or ", ".join(libraries_for(device))
    return Reason(code="flash_attn_build", value=device.arch, allowed=allowed, hint=hint)


def _objections(
    library: _Library, build: VendorBuild | None, device: DeviceFacts, request: AttentionRequest
) -> Iterator[Reason]:
    """Yield what one library has against a request; `build` None is taken as complete."""
    case = _Case(library=library, build=build, device=device, request=request)
    for check in _CHECKS:
        reason = check(case)
        if reason is not None:
            yield reason


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A library and what it is asked for."""

    library: _Library
    build: VendorBuild | None
    device: DeviceFacts
    request: AttentionRequest

    def lacks(self, flag: str) -> bool:
        """Whether the build says that it was compiled without something."""
        return self.build is not None and self.build.flag(flag) == "off"

    def takes(self, *arguments: str) -> bool:
        """Whether one of its calls has one of these arguments."""
        if self.build is None:
            return True
        have = {name.rpartition(".")[2] for name in self.build.optional_arguments}
        return not have.isdisjoint(arguments)

    @property
    def major(self) -> int:
        return 0 if self.device.capability is None else self.device.capability.major

    @property
    def version(self) -> int:
        return self.library.version


def _dtype(case: _Case) -> Reason | None:
    dtypes = [d for d in HALVES if not (d is torch.float16 and case.lacks("fp16"))]
    if case.request.dtype in dtypes:
        return None
    return Reason(
        code="dtype",
        value=dtype_name(case.request.dtype),
        allowed=", ".join(map(dtype_name, dtypes)),
    )


def _head_size(case: _Case) -> Reason | None:
    size, step = case.request.head_size, _head_step(case)
    is_wide = case.version == 4 and case.major in (10, 11)
    if size % step == 0 and 8 <= size <= _HEAD_SIZE_MAX and not is_wide:
        return None
    if is_wide and size % step == 0 and (8 <= size <= 128 or size in (192, 256)):
        return None
    allowed = "8 to 128, 192 with 128, 256" if is_wide else f"8 to {_HEAD_SIZE_MAX}"
    return Reason(code="head_size", value=str(size), allowed=f"{allowed}, a multiple of {step}")


def _head_step(case: _Case) -> int:
    """Return what widths are multiples of: 16 bytes, which one load takes.

    FlashAttention 4 reads pages of heads in whole steps of its products, 16 elements, alone.
    """
    is_paged = not case.request.is_cache_free
    is_coarse = case.version == 4 and is_paged
    return 16 if is_coarse or case.request.kv_cache_dtype in E4M3_NAMES else 8


def _head_size_v(case: _Case) -> Reason | None:
    size, value_size = case.request.head_size, case.request.value_size
    if case.version == 4 and case.major in (10, 11):
        wide_pairs = {192: 128, 256: 256}
        is_narrow = max(size, value_size) <= 128 and value_size % _head_step(case) == 0
        if is_narrow or value_size == wide_pairs.get(size):
            return None
        return _value_width(value_size, "up to 128, 128 with 192, 256 with 256")
    if size == value_size:
        return None
    step = _head_step(case)
    if case.version == 4 and value_size % step == 0 and 8 <= value_size <= _HEAD_SIZE_MAX:
        return None
    if case.version == 3:
        return _flash_attn_3_widths(case)
    return _value_width(value_size, f"{size}, as head_size")


def _flash_attn_3_widths(case: _Case) -> Reason | None:
    """Look at values of another width.

    Up to 64, where K and V share one kernel, it reads pages of V as wide as K: columns of a wider
    V are left out (met on an H200 with vLLM 0.25.1: 32 beside 16, 40 beside 24, 64 beside 32).
    """
    size, value_size = case.request.head_size, case.request.value_size
    allowed = []
    if not case.lacks("hdimdiff64"):
        allowed.append("8 to head_size, or 72 to 512, with head_size up to 64")
    if not case.lacks("hdimdiff192"):
        allowed.append("97 to 128 with head_size 129 to 192")
    is_read = 8 <= value_size <= size or 64 < value_size <= 512
    is_narrow = size <= 64 and is_read and not case.lacks("hdimdiff64")
    is_middle = 128 < size <= 192 and 96 < value_size <= 128 and not case.lacks("hdimdiff192")
    if value_size % 8 == 0 and (is_narrow or is_middle):
        return None
    return _value_width(value_size, "; ".join([f"{size}, as head_size", *allowed]))


def _value_width(value_size: int, allowed: str) -> Reason:
    return Reason(code="head_size_v", value=str(value_size), allowed=allowed)


def _pages(case: _Case) -> Reason | None:
    request, library = case.request, case.library
    if request.is_cache_free:
        return None
    if case.lacks("pagedkv"):
        return Reason(
            code="paged_cache",
            value=str(request.attn_type),
            allowed="encoder, encoder_only: this build has no paged keys and values "
            "(FLASHATTENTION_DISABLE_PAGEDKV)",
            hint='pip install "attn-cuda[fa3]"',
        )
    if request.block_size is None or request.block_size % library.page_multiple == 0:
        return None
    return Reason(
        code="block_size",
        value=str(request.block_size),
        allowed=f"a multiple of {library.page_multiple}",
    )


def _kv_cache_dtype(case: _Case) -> Reason | None:
    name, dtype = case.request.kv_cache_dtype, case.request.dtype
    if name in ("auto", dtype_name(dtype)):
        return None
    has_fp8 = case.version == 3 and not case.lacks("fp8")
    if name in E4M3_NAMES and has_fp8 and dtype is torch.bfloat16:
        return None
    allowed = "auto"
    if has_fp8:
        allowed += ", and fp8, fp8_e4m3 with dtype=bfloat16, which its fp8 kernels return"
    return Reason(code="kv_cache_dtype", value=name, allowed=allowed)


def _window(case: _Case) -> Reason | None:
    if not (case.request.has_window and case.lacks("local")):
        return None
    return Reason(
        code="window",
        value=str(case.request.window),
        allowed="none: this build has no windows (FLASHATTENTION_DISABLE_LOCAL)",
    )


def _softcap(case: _Case) -> Reason | None:
    if case.request.softcap is None or not case.lacks("softcap"):
        return None
    return Reason(
        code="softcap",
        value=str(case.request.softcap),
        allowed="None: this build has no softcap (FLASHATTENTION_DISABLE_SOFTCAP)",
    )


def _softcap_lse(case: _Case) -> Reason | None:
    """Refuse an LSE of capped logits, whose tanh is one approximate instruction (2^-11)."""
    if case.request.softcap is None or not case.request.needs_lse:
        return None
    return Reason(
        code="lse", value="True", allowed="False with softcap, whose tanh its kernels approximate"
    )


def _alibi(case: _Case) -> Reason | None:
    if not case.request.has_alibi or case.version == 2:
        return None
    return Reason(code="alibi", value="True", allowed="False; FlashAttention 2 has slopes")


def _sinks(case: _Case) -> Reason | None:
    request = case.request
    if not request.has_sinks:
        return None
    if case.version == 2 or not case.takes("sinks", "s_aux", "learnable_sink"):
        return Reason(code="sink", value="True", allowed="False; FlashAttention 3 and 4 take sinks")
    if case.version == 3 and request.value_size != request.head_size:
        return _value_width(request.value_size, f"{request.head_size}, as head_size, with sinks")
    if case.library.name == "vllm_flash_attn_3" and request.num_heads > _MAX_SINK_HEADS:
        return Reason(
            code="num_heads",
            value=str(request.num_heads),
            allowed=f"up to {_MAX_SINK_HEADS} with sinks",
        )
    return None


def _batch_invariant(case: _Case) -> Reason | None:
    request = case.request
    if not request.batch_invariant:
        return None
    if case.version == 4:
        return Reason(code="batch_invariance", value="True", allowed="False with FlashAttention 4")
    # With pages of whole tiles it chooses its loads, and with them its tiles, by the longest query.
    is_large = request.block_size is not None and request.block_size > _INVARIANT_PAGE_MAX
    if case.version == 3 and is_large:
        return Reason(
            code="block_size",
            value=str(request.block_size),
            allowed=f"up to {_INVARIANT_PAGE_MAX} with batch_invariant and FlashAttention 3",
        )
    return None


def _masks(case: _Case) -> Reason | None:
    """Refuse masks that none of the calls takes as it is called here."""
    request = case.request
    asked = {
        "mm_prefix": request.use_mm_prefix,
        "per_request_causal": request.per_request_causal,
        "chunked_local": request.chunk_size is not None,
    }
    code = next((code for code, is_asked in asked.items() if is_asked), None)
    return None if code is None else Reason(code=code, value="True", allowed="False")


_CHECKS: tuple[Callable[[_Case], Reason | None], ...] = (
    *(_dtype, _head_size, _head_size_v, _pages, _kv_cache_dtype, _window, _softcap, _softcap_lse),
    *(_alibi, _sinks, _batch_invariant, _masks),
)
