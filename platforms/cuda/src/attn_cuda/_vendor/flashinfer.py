"""FlashInfer: kernels that are planned on the host and mostly compiled at first use."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import (
    build_flags,
    import_library,
    installed_version,
    optional_arguments,
    require,
)

__all__ = ["SPEC", "probe"]

SPEC = VendorSpec(
    name="flashinfer",
    distributions=("flashinfer-python",),
    module="flashinfer",
    install='pip install "attn-cuda[flashinfer]"',
    probe="attn_cuda._vendor.flashinfer:probe",
)

_WRAPPERS = {
    "prefill": "BatchPrefillWithPagedKVCacheWrapper",
    "ragged": "BatchPrefillWithRaggedKVCacheWrapper",
    "decode": "BatchDecodeWithPagedKVCacheWrapper",
}
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
    library = import_library("flashinfer")
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags(
            {
                "cubins": installed_version(["flashinfer-cubin"]),
                "jit_cache": installed_version(["flashinfer-jit-cache"]),
            }
        ),
        kernel_lse_base="2",
        optional_arguments=optional_arguments(_calls(library), _OPTIONAL),
    )


def _calls(library: ModuleType) -> dict[str, Callable[..., object] | None]:
    calls: dict[str, Callable[..., object] | None] = {}
    for short, name in _WRAPPERS.items():
        wrapper = require(library, name, "too old; pip install -U flashinfer-python")
        calls[f"{short}.plan"] = wrapper.plan
        calls[f"{short}.run"] = wrapper.run
    for name in _FUNCTIONS:
        # In some releases only their modules have them, not the package.
        calls[name] = getattr(library, name, None) or _in_submodules(library, name)
    return calls


def _in_submodules(library: ModuleType, name: str) -> Callable[..., object] | None:
    modules = (getattr(library, part, None) for part in ("prefill", "decode"))
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)
