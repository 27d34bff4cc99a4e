"""FlashAttention as an installed vLLM carries it: one Python interface over two extensions.

The interface is loaded from vLLM's folder under a name of its own, so that vLLM itself, whose
import configures torch, stays out of the process. Where vLLM is loaded, its copy counts.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attn_shared.inventory import VendorBuild
from attn_shared.probing import (
    argument_names,
    import_library,
    installed_version,
    optional_arguments,
    require,
)

__all__ = ["DISTRIBUTION", "describe", "interface", "operator_3"]

DISTRIBUTION = "vllm"

_MODULE = "vllm.vllm_flash_attn.flash_attn_interface"
_ALIAS = "attn_cuda_vllm_flash_attn"
_OPTIONAL = (
    *("block_table", "seqused_k", "out", "softcap", "alibi_slopes", "s_aux", "fa_version"),
    *("scheduler_metadata", "num_splits", "q_descale", "q_v"),
)

_EXTENSION_3 = "_vllm_fa3_C"
_OPERATOR_3 = (
    *("q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k"),
    *("cu_seqlens_k_new", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k"),
    *("page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"),
    *("q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left"),
    *("window_size_right", "softcap", "is_rotary_interleaved", "scheduler_metadata"),
    *("num_splits", "pack_gqa", "sm_margin", "s_aux", "cp_world_size", "cp_rank"),
    "cp_tot_seqused_k",
)
"""What it takes in vLLM 0.25.1, as its schema says; none has a default."""


def interface() -> ModuleType:
    """Return the module flash_attn_interface of the installed vLLM.

    Raises:
        ImportError: vLLM has none, or the loader's own words.
    """
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    if _ALIAS not in sys.modules:
        package = ModuleType(_ALIAS)
        package.__path__ = [str(_folder())]
        sys.modules[_ALIAS] = package
    return import_library(f"{_ALIAS}.flash_attn_interface")


def operator_3() -> Callable[..., Any] | None:
    """Return the operator of FlashAttention 3 behind the interface, if it is the one known here.

    The interface's function around it makes a tensor that version 3 does not read and looks the
    operator up by its name at every call. It is called by position, so that every argument counts.
    """
    extension = getattr(interface(), _EXTENSION_3, None)
    if extension is None:
        return None
    found = getattr(extension, "fwd", None)
    if found is None:
        found = getattr(getattr(torch.ops, _EXTENSION_3), "fwd", None)
    found = getattr(found, "default", found)
    return found if argument_names(found) == _OPERATOR_3 else None


def _folder() -> Path:
    """Return where vLLM keeps it; to look for the top-level package imports nothing."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        folder = Path(place) / "vllm_flash_attn"
        if (folder / "flash_attn_interface.py").is_file():
            return folder
    raise ImportError(
        f"vllm ({', '.join(places) or 'not on the path'}) has no vllm_flash_attn: it was built for "
        "another platform"
    )


def describe(version: int) -> VendorBuild:
    """Describe one of the generations that the interface runs.

    Args:
        version: 2 or 3.

    Raises:
        ImportError: its extension does not load, in the loader's own words.
    """
    module = interface()
    if not require(module, f"FA{version}_AVAILABLE", "another vLLM than this was written for"):
        words = getattr(module, f"FA{version}_UNAVAILABLE_REASON", None)
        raise ImportError(f"vllm's FlashAttention {version} does not load: {words}")
    hint = "too old; pip install -U vllm"
    calls = {
        "flash_attn_varlen_func": require(module, "flash_attn_varlen_func", hint),
        "get_scheduler_metadata": getattr(module, "get_scheduler_metadata", None),
    }
    return VendorBuild(
        version=installed_version([DISTRIBUTION]),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )
