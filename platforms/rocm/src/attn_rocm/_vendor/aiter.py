"""AITER, AMD's kernels: the distribution amd-aiter, whose releases differ in their calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import (
    build_flags,
    import_library,
    installed_version,
    optional_arguments,
    require,
)

__all__ = ["SPEC", "call", "library", "probe"]

SPEC = VendorSpec(
    name="aiter",
    distributions=("amd-aiter", "aiter"),
    module="aiter",
    install='pip install "attn-rocm[aiter]"',
    probe="attn_rocm._vendor.aiter:probe",
)

# The module moved; the newer place first.
_UNIFIED_ATTENTION = (
    "aiter.ops.triton.attention.unified_attention",
    "aiter.ops.triton.unified_attention",
)

_OPTIONAL = (
    *("sink_ptr", "sinks", "out", "block_table", "seqlen_k", "kv_last_page_lens"),
    *("k_descale", "v_descale"),
    *("q_scales", "page_size", "return_lse", "shuffled_kv_cache", "sliding_window"),
)


def library() -> ModuleType:
    """Return the library; to import it asks ROCm for the GPU's architecture.

    Raises:
        ImportError: with the library's own words. What else its import raises passes through.
    """
    return import_library("aiter")


def call(name: str) -> Callable[..., Any]:
    """Return one of its attention calls.

    Args:
        name: "flash_attn_varlen_func", "mha_batch_prefill_func", "paged_attention_v1" or
            "unified_attention".

    Raises:
        ImportError: the library does not load, or lacks the call.
    """
    module = _first_module(_UNIFIED_ATTENTION) if name == "unified_attention" else library()
    if module is None:
        raise ImportError(f"this aiter has none of {', '.join(_UNIFIED_ATTENTION)}")
    found: Callable[..., Any] = require(module, name, "another aiter than this was written for")
    return found


def probe() -> VendorBuild:
    """Import the library and say which of its calls and arguments this release has.

    The flag "window_size" is the length of a window tuple, 2 or 3 (left, right, sink tokens);
    "unified_attention" is the module that holds the Triton call; the other calls are on or off.

    Raises:
        ImportError: with the library's own words, or naming what is missing.
    """
    module = library()
    varlen = require(module, "flash_attn_varlen_func", "no attention in this aiter; reinstall it")
    unified = _first_module(_UNIFIED_ATTENTION)
    mla = _first_module(("aiter.mla",))
    calls: dict[str, Callable[..., object] | None] = {
        "flash_attn_varlen_func": varlen,
        "mha_batch_prefill_func": getattr(module, "mha_batch_prefill_func", None),
        "paged_attention_v1": getattr(module, "paged_attention_v1", None),
        "pa_fwd_asm": getattr(module, "pa_fwd_asm", None),
        "mla_decode_fwd": getattr(mla, "mla_decode_fwd", None),
        "unified_attention": getattr(unified, "unified_attention", None),
    }
    flags: dict[str, object] = {name: found is not None for name, found in calls.items()}
    flags |= {
        "window_size": _window_length(varlen),
        "unified_attention": unified.__name__ if unified is not None else "absent",
    }
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags(flags),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )


def _first_module(names: tuple[str, ...]) -> ModuleType | None:
    """Return the first of these modules that exists; one that exists and fails is an error."""
    for name in names:
        try:
            return import_library(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    return None


def _window_length(function: Callable[..., object]) -> int:
    default = inspect.signature(function).parameters["window_size"].default
    return len(default)
