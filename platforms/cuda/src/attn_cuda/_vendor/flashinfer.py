"""FlashInfer: kernels that are planned on the host and mostly compiled at first use."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from attn_cuda._vendor.flashinfer_library import library
from attn_cuda.toolkit import find_toolkit
from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import (
    build_flags,
    installed_version,
    optional_arguments,
    require,
)

__all__ = ["SPEC", "probe", "trtllm_call", "wrapper"]

SPEC = VendorSpec(
    name="flashinfer",
    distributions=("flashinfer-python",),
    module="flashinfer",
    install="pip install flashinfer-python",
    probe="attn_cuda._vendor.flashinfer:probe",
)

_WRAPPERS = {
    "prefill": "BatchPrefillWithPagedKVCacheWrapper",
    "ragged": "BatchPrefillWithRaggedKVCacheWrapper",
    "decode": "BatchDecodeWithPagedKVCacheWrapper",
    "cascade": "MultiLevelCascadeAttentionWrapper",
}
_TOO_OLD = "too old; pip install -U flashinfer-python"
_FUNCTIONS = ("trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache")

_OPTIONAL = (
    *("lse_base", "lse_layout", "sinks", "out", "lse", "return_lse", "causal", "kv_cache_sf"),
    *("fixed_split_size", "disable_split_kv", "uniform_q_len", "q_len_per_req", "cum_seq_lens_q"),
)


def probe() -> VendorBuild:
    """Import the library and say what its planned and its direct calls take.

    Raises:
        ImportError: with the library's own words, or naming what is missing.
    """
    module = library()
    toolkit = find_toolkit(os.environ)
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags(
            {
                "compiler": toolkit is not None and toolkit.has_compiler,
                "cubins": installed_version(["flashinfer-cubin"]),
                "jit_cache": installed_version(["flashinfer-jit-cache"]),
            }
        ),
        kernel_lse_base="2",
        optional_arguments=optional_arguments(_calls(module), _OPTIONAL),
    )


def wrapper(short: str) -> Any:
    """Return one of its planned classes.

    Args:
        short: "prefill", "ragged", "decode" or "cascade".

    Raises:
        ImportError: the library does not load, or has none.
    """
    return require(library(), _WRAPPERS[short], _TOO_OLD)


def trtllm_call(phase: str) -> Callable[..., Any]:
    """Return the call that runs trtllm-gen and XQA.

    Args:
        phase: "context" or "decode".

    Raises:
        ImportError: the library does not load, or has none.
    """
    module, name = library(), f"trtllm_batch_{phase}_with_kv_cache"
    found = getattr(module, name, None) or _in_submodules(module, name)
    if found is None:
        raise ImportError(f"flashinfer has no {name}: {_TOO_OLD}")
    return found


def _calls(module: ModuleType) -> dict[str, Callable[..., object] | None]:
    calls: dict[str, Callable[..., object] | None] = {}
    for short, name in _WRAPPERS.items():
        planned = require(module, name, _TOO_OLD)
        calls[f"{short}.plan"] = planned.plan
        calls[f"{short}.run"] = planned.run
    for name in _FUNCTIONS:
        # In some releases only their modules have them, not the package.
        calls[name] = getattr(module, name, None) or _in_submodules(module, name)
    return calls


def _in_submodules(module: ModuleType, name: str) -> Callable[..., object] | None:
    parts = (getattr(module, part, None) for part in ("prefill", "decode"))
    return next((getattr(part, name) for part in parts if hasattr(part, name)), None)
