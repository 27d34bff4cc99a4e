"""FlashAttention 4: the distribution flash-attn-4, compiled at run time by NVIDIA's CuTe DSL."""

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

__all__ = ["SPEC", "interface", "probe"]

# Its package flash_attn.cute lies inside FlashAttention 2's, if that is there.
SPEC = VendorSpec(
    name="flash_attn_4",
    distributions=("flash-attn-4",),
    module="flash_attn.cute",
    install="pip install --pre flash-attn-4",
    probe="attn_cuda._vendor.flash_attn_4:probe",
)

_OPTIONAL = (
    *("page_table", "seqused_k", "qv", "learnable_sink", "softcap", "score_mod", "mask_mod"),
    *("num_splits", "return_lse", "scheduler_metadata", "out"),
)


def interface() -> ModuleType:
    """Return the package that holds its calls.

    Raises:
        ImportError: with the loader's own words.
    """
    return import_library("flash_attn.cute")


def probe() -> VendorBuild:
    """Import the library and its compiler, and say what it has.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    package = interface()
    inner = import_library("flash_attn.cute.interface")
    name = "flash_attn_varlen_func"
    calls = {
        name: require(package, name, "another flash_attn hides it; reinstall flash-attn-4"),
        "get_scheduler_metadata": getattr(inner, "get_scheduler_metadata", None),
        "flash_attn_combine": getattr(inner, "flash_attn_combine", None),
    }
    return VendorBuild(
        # The package's own __version__ asks for a distribution of another name.
        version=installed_version(SPEC.distributions),
        flags=build_flags({"cutlass_dsl": installed_version(["nvidia-cutlass-dsl"])}),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )
