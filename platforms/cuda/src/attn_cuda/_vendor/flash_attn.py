"""FlashAttention 2: upstream's distribution flash-attn."""

from __future__ import annotations

from types import ModuleType

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import import_library, installed_version, optional_arguments, require

__all__ = ["SPEC", "interface", "probe"]

# A top-level package flash_attn may be FlashAttention 4's alone, so that this one's is its sign.
SPEC = VendorSpec(
    name="flash_attn",
    distributions=("flash-attn",),
    module="flash_attn.flash_attn_interface",
    install="pip install flash-attn",
    probe="attn_cuda._vendor.flash_attn:probe",
)

_OPTIONAL = ("block_table", "softcap", "alibi_slopes", "seqused_k", "out", "sinks")


def interface() -> ModuleType:
    """Return the module that holds its calls.

    Raises:
        ImportError: with the loader's own words.
    """
    return import_library("flash_attn.flash_attn_interface")


def probe() -> VendorBuild:
    """Import the library, whose extension was compiled against one torch, and say what it has.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    module = interface()
    hint = "too old for paged attention; pip install -U flash-attn"
    calls = {
        name: require(module, name, hint)
        for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    }
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )
