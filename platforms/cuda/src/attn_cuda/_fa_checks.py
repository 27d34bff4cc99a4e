"""What one FlashAttention library has against a request.

Limits are those that the libraries check themselves, or showed on an H200: flash-attn 2.8.3,
tokenspeed-fa3 3.0.0.post20260810, vLLM 0.25.1 and flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attn_shared.capability import Reason
from attn_shared.device import DeviceFacts
from attn_shared.dtypes import dtype_name
from attn_shared.inventory import VendorBuild
from attn_shared.request import AttentionRequest

__all__ = ["Library", "objections"]

_HALVES = (torch.float16, torch.bfloat16)
_E4M3_NAMES = ("fp8", "fp8_e4m3")

_HEAD_SIZE_MAX = 256
_MAX_SINK_HEADS = 64
_INVARIANT_PAGE_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
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


def objections(
    library: Library, build: VendorBuild | None, device: DeviceFacts, request: AttentionRequest
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

    library: Library
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
    dtypes = [d for d in _HALVES if not (d is torch.float16 and case.lacks("fp16"))]
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
    return 16 if is_coarse or case.request.kv_cache_dtype in _E4M3_NAMES else 8


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
            hint="pip install tokenspeed-fa3",
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
    if name in _E4M3_NAMES and has_fp8 and dtype is torch.bfloat16:
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
