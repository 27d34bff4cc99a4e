"""Intel's attention kernels for Xe2 and later: the distribution vllm-xpu-kernels."""

from __future__ import annotations

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


def probe() -> VendorBuild:
    """Import the library and its kernels, and say what its one call takes.

    The package imports without its kernels and then computes with a slow stand-in: that counts as
    not loading. The flag "cache_ops" tells whether the operators on the cache are there as well.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    interface = import_library("vllm_xpu_kernels.flash_attn_interface")
    name = "flash_attn_varlen_func"
    calls = {name: require(interface, name, "reinstall it")}
    if not getattr(interface, "FA2_AVAILABLE", True):
        words = getattr(interface, "FA2_UNAVAILABLE_REASON", None) or "it does not say why"
        raise ImportError(f"its kernels did not load: {words}")
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags({"cache_ops": _has_cache_ops()}),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )


def _has_cache_ops() -> bool:
    try:
        import_library("vllm_xpu_kernels._C")
    except ImportError:
        return False
    return True
