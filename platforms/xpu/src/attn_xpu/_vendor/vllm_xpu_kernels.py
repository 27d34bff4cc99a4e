"""Intel's attention kernels for Xe2 and later: the distribution vllm-xpu-kernels."""

from __future__ import annotations

from types import ModuleType

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import (
    build_flags,
    import_library,
    installed_version,
    optional_arguments,
    require,
)
from attn_xpu import _xpu_fa_slow

__all__ = ["SPEC", "interface", "probe"]

SPEC = VendorSpec(
    name="vllm_xpu_kernels",
    distributions=("vllm-xpu-kernels",),
    module="vllm_xpu_kernels",
    install='pip install "attn-xpu[kernels]"',
    probe="attn_xpu._vendor.vllm_xpu_kernels:probe",
)

_OPTIONAL = (
    *("block_table", "seqused_k", "out", "s_aux", "softcap", "alibi_slopes", "return_softmax_lse"),
    *("q_descale", "k_descale", "num_splits_kv", "is_mix_batch", "host_kv_lens"),
)


def interface() -> ModuleType:
    """Return the module that holds its call; its stand-in for kernels is watched from then on.

    Raises:
        ImportError: with the loader's own words; the package imports without its kernels and then
            computes nothing, which counts as not loading.
    """
    module = import_library("vllm_xpu_kernels.flash_attn_interface")
    require(module, "flash_attn_varlen_func", "reinstall it")
    if not getattr(module, "FA2_AVAILABLE", True):
        words = getattr(module, "FA2_UNAVAILABLE_REASON", None) or "it does not say why"
        raise ImportError(f"its kernels did not load: {words}")
    _xpu_fa_slow.watch(module)
    return module


def probe() -> VendorBuild:
    """Import the library and its kernels, and say what its one call takes.

    The flag "cache_ops" tells whether the operators on the cache are there as well, and
    "slow_reference" whether calls that run without a kernel can be counted.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    module = interface()
    calls = {"flash_attn_varlen_func": module.flash_attn_varlen_func}
    is_counted = _xpu_fa_slow.is_watched(module)
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags(
            {"cache_ops": _has_cache_ops(), "slow_reference": "counted" if is_counted else "none"}
        ),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )


def _has_cache_ops() -> bool:
    try:
        import_library("vllm_xpu_kernels._C")
    except ImportError:
        return False
    return True
