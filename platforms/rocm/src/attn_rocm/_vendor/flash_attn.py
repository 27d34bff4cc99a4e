"""Upstream FlashAttention 2 built for ROCm: composable kernels, or Triton's."""

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
    name="flash_attn",
    distributions=("flash-attn",),
    module="flash_attn.flash_attn_interface",
    install="pip install flash-attn --no-build-isolation (it compiles for this machine's GPU)",
    probe="attn_rocm._vendor.flash_attn:probe",
)

_OPTIONAL = ("block_table", "softcap", "alibi_slopes", "seqused_k", "out", "sinks")


def probe() -> VendorBuild:
    """Import the library and say which kernels it chose: the flag "kernels" is "ck" or "triton".

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    interface = import_library("flash_attn.flash_attn_interface")
    hint = "too old for paged attention; pip install -U flash-attn"
    calls = {
        name: require(interface, name, hint)
        for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    }
    is_triton = bool(getattr(interface, "USE_TRITON_ROCM", False))
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags({"kernels": "triton" if is_triton else "ck"}),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )
