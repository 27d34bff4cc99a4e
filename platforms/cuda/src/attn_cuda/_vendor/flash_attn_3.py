"""FlashAttention 3 for Hopper, any build whose module is flash_attn_interface."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import (
    argument_names,
    build_flags,
    import_library,
    installed_version,
    optional_arguments,
    require,
)

__all__ = ["SPEC", "describe", "interface", "operator", "probe"]

SPEC = VendorSpec(
    name="flash_attn_3",
    distributions=("tokenspeed-fa3", "flash-attn-3"),
    module="flash_attn_interface",
    install="pip install tokenspeed-fa3",
    probe="attn_cuda._vendor.flash_attn_3:probe",
)

_OPTIONAL = ("sinks", "s_aux", "out", "page_table", "qv", "scheduler_metadata", "num_splits")

_OPERATOR_ARGUMENTS = frozenset(
    {"q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "sinks"}
    | {"max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal", "softcap", "num_splits"}
    | {"window_size_left", "window_size_right", "scheduler_metadata"}
    | {"q_descale", "k_descale", "v_descale"}
)

# FLASHATTENTION_DISABLE_PAGEDKV, FLASHATTENTION_ENABLE_VCOLMAJOR, with and without "_" inside
_BUILD_FLAG = re.compile(r"FLASH_?ATTENTION_(DISABLE|ENABLE)_(\w+)")


def interface() -> ModuleType:
    """Return the module that holds its calls.

    Raises:
        ImportError: with the loader's own words.
    """
    return import_library("flash_attn_interface")


def operator() -> Callable[..., Any] | None:
    """Return the operator behind the library's Python functions, if it is as this was written for.

    It takes an output and has no autograd around it, which saves the host most of a call's time.
    """
    found = getattr(getattr(interface(), "flash_attn_3_gpu", None), "fwd", None)
    found = getattr(found, "default", found)
    return found if set(argument_names(found)) >= _OPERATOR_ARGUMENTS else None


def probe() -> VendorBuild:
    """Import the library and read what it was built with.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    build = describe(SPEC, "flash_attn_interface", "flash_attn_config")
    if operator() is None:
        return build
    return replace(build, optional_arguments=build.optional_arguments | {"fwd.out"})


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
