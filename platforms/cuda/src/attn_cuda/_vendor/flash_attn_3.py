"""FlashAttention 3 for Hopper, any build whose module is flash_attn_interface."""

from __future__ import annotations

import re
from types import ModuleType

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import (
    build_flags,
    import_library,
    installed_version,
    optional_arguments,
    require,
)

__all__ = ["SPEC", "describe", "interface", "probe"]

SPEC = VendorSpec(
    name="flash_attn_3",
    distributions=("tokenspeed-fa3", "flash-attn-3"),
    module="flash_attn_interface",
    install='pip install "attn-cuda[fa3]"',
    probe="attn_cuda._vendor.flash_attn_3:probe",
)

_OPTIONAL = ("sinks", "s_aux", "out", "page_table", "qv", "scheduler_metadata", "num_splits")

# FLASHATTENTION_DISABLE_PAGEDKV, FLASHATTENTION_ENABLE_VCOLMAJOR, with and without "_" inside
_BUILD_FLAG = re.compile(r"FLASH_?ATTENTION_(DISABLE|ENABLE)_(\w+)")


def interface() -> ModuleType:
    """Return the module that holds its calls.

    Raises:
        ImportError: with the loader's own words.
    """
    return import_library("flash_attn_interface")


def probe() -> VendorBuild:
    """Import the library and read what it was built with.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    return describe(SPEC, "flash_attn_interface", "flash_attn_config")


def describe(spec: VendorSpec, interface_name: str, config_name: str) -> VendorBuild:
    """Describe a build of FlashAttention 3 by its interface and its generated configuration.

    Flags are claims in lower case, "pagedkv" = "on"; a build without a configuration has none.
    """
    module = import_library(interface_name)
    hint = "no FlashAttention 3 interface; reinstall it"
    calls = {
        name: require(module, name, hint)
        for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    }
    calls["get_scheduler_metadata"] = getattr(module, "get_scheduler_metadata", None)
    return VendorBuild(
        version=installed_version(spec.distributions),
        flags=_flags(config_name),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )


def _flags(config_name: str) -> tuple[tuple[str, str], ...]:
    try:
        config: ModuleType = import_library(config_name)
    except ModuleNotFoundError:
        return ()
    claims: dict[str, object] = {}
    for name, value in config.CONFIG["build_flags"].items():
        match = _BUILD_FLAG.fullmatch(name)
        if match:
            claims[match[2].lower()] = bool(value) is (match[1] == "ENABLE")
    return build_flags(claims)
