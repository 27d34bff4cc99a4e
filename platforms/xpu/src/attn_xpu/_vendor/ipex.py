"""intel-extension-for-pytorch, whose last release is 2.8."""

from __future__ import annotations

from types import ModuleType

import torch

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import (
    build_flags,
    import_library,
    installed_version,
    optional_arguments,
    require,
)

__all__ = ["SPEC", "interface", "label", "probe"]

SPEC = VendorSpec(
    name="ipex",
    distributions=("intel-extension-for-pytorch",),
    module="intel_extension_for_pytorch",
    install='pip install "intel-extension-for-pytorch==2.8.*" (Intel\'s index; needs torch 2.8)',
    probe="attn_xpu._vendor.ipex:probe",
)

_CALLS = ("flash_attn_varlen_func", "single_query_cached_kv_attention", "reshape_and_cache")
_OPTIONAL = (
    *("window_size_left", "window_size", "softcap", "alibi_slopes", "kv_cache_dtype"),
    *("k_scale", "v_scale", "block_tables"),
)


def interface() -> ModuleType:
    """Return the module that holds its attention.

    With another torch than its own it ends the process while it is imported, so that the versions
    are compared before.

    Raises:
        ImportError: torch is of another version, or with the library's own words.
    """
    _check_torch(installed_version(SPEC.distributions), torch.__version__)
    try:
        modules = import_library("intel_extension_for_pytorch.llm.modules")
    except NameError as error:
        message = f"{error}; it takes transformers where it finds it, and does not load with 5"
        raise ImportError(message) from error
    for name in ("PagedAttention", "VarlenAttention"):
        require(modules, name, "too old; its last release is 2.8")
    return modules


def label() -> str:
    """Return which build it is, "cpu" or "xpu"; the metadata of the package index leaves it out.

    Raises:
        ImportError: as `interface`.
    """
    interface()
    package = import_library("intel_extension_for_pytorch")
    versions = (getattr(package, "__version__", ""), installed_version(SPEC.distributions))
    labels = (version.partition("+")[2] for version in versions)
    return next((found for found in labels if found), "unlabelled")


def probe() -> VendorBuild:
    """Import the library, if torch is of its version, and say what its paged attention takes.

    The flag "build" is the label of its version, "xpu" or "cpu".

    Raises:
        ImportError: torch is of another version, or with the library's own words.
    """
    paged = interface().PagedAttention
    calls = {name: getattr(paged, name, None) for name in _CALLS}
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags({"build": label()}),
        kernel_lse_base=None,
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )


def _check_torch(version: str, torch_version: str) -> None:
    from packaging.version import InvalidVersion, Version

    try:
        wanted, found = Version(version), Version(torch_version)
    except InvalidVersion:
        return  # a build without a version cannot be compared
    if wanted.release[:2] != found.release[:2]:
        raise ImportError(
            f"intel-extension-for-pytorch {version} needs torch {wanted.major}.{wanted.minor}, "
            f"and this is torch {torch_version}"
        )
