"""FlashMLA, of which two distributions with one module and different arguments exist.

tokenspeed-flashmla is built for torch 2.11, and for Hopper; sgl-flash-mla wants torch 2.14.1 or
newer. An extra cannot ask for the torch that is there, so that each has its own, and the command
that mends an absence names the one that fits.
"""

from __future__ import annotations

import inspect
from types import ModuleType

import torch
from packaging.version import Version

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import (
    build_flags,
    import_library,
    installed_version,
    optional_arguments,
    require,
)

__all__ = ["SPEC", "extra_for", "has_choice", "interface", "probe"]

_OLDEST_TORCH_OF_SGL = Version("2.12")  # older ones stay, and tokenspeed's build is for them


def extra_for(torch_version: str) -> str:
    """Return the extra of attn-cuda whose FlashMLA fits a torch.

    sgl-flash-mla brings a newer torch along where the one that is there is too old for it.
    """
    release = Version(Version(torch_version).base_version)
    return "flashmla" if release >= _OLDEST_TORCH_OF_SGL else "flashmla-hopper"


SPEC = VendorSpec(
    name="flash_mla",
    distributions=("sgl-flash-mla", "tokenspeed-flashmla", "flash-mla"),
    module="flash_mla",
    install=f'pip install "attn-cuda[{extra_for(torch.__version__)}]"',
    probe="attn_cuda._vendor.flash_mla:probe",
)

_OPTIONAL = (
    *("use_legacy", "kv_format", "descale_q", "descale_k", "indices", "attn_sink", "topk_length"),
    *("enable_batch_invariant", "is_fp8_kvcache", "return_log2_lse"),
)


def interface() -> ModuleType:
    """Return the module that holds its calls.

    Raises:
        ImportError: with the loader's own words.
    """
    return import_library("flash_mla")


def has_choice(library: ModuleType) -> bool:
    """Whether each call says which of two sets of kernels it means."""
    return "use_legacy" in inspect.signature(library.flash_mla_with_kvcache).parameters


def probe() -> VendorBuild:
    """Import the library and say which of its two generations of kernels are there.

    The flag "legacy" tells whether the kernels for Hopper and dense decode, which upstream has
    dropped, are carried as a second set; a build without that choice has no such flag.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    library = interface()
    calls = {
        name: require(library, name, "reinstall it")
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    }
    has_legacy = getattr(library, "has_legacy", None)
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags({} if has_legacy is None else {"legacy": bool(has_legacy())}),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )
