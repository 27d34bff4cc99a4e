"""CUTLASS's decode over latents for Blackwell, as an installed vLLM carries it: two operators.

They are loaded from vLLM's folder, so that vLLM itself, whose import configures torch, stays out of
the process. Where vLLM's own module of operators is loaded, that counts.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import installed_version

__all__ = ["SPEC", "interface", "probe"]

SPEC = VendorSpec(
    name="vllm_cutlass_mla",
    distributions=("vllm",),
    module="vllm._custom_ops",
    install="pip install vllm",
    probe="attn_cuda._vendor.vllm_cutlass_mla:probe",
)

_MODULE = "vllm._custom_ops"
_DECODE = "sm100_cutlass_mla_decode"
_EXTENSIONS = ("_C_stable_libtorch.abi3.so", "_C.abi3.so")


def interface() -> Any:
    """Return what holds sm100_cutlass_mla_decode and sm100_cutlass_mla_get_workspace_size.

    Raises:
        ImportError: vLLM has no such operator, or the loader's own words.
    """
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    for path in _extensions():
        _load(path)
        if hasattr(torch.ops._C, _DECODE):
            return torch.ops._C
    raise ImportError(f"vllm has no operator {_DECODE}: it was built for another platform")


def _load(path: Path) -> None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(f"{path.name} does not load: {error}") from error


def _extensions() -> Iterator[Path]:
    spec = importlib.util.find_spec("vllm")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for name in _EXTENSIONS:
            if (Path(place) / name).is_file():
                yield Path(place) / name


def probe() -> VendorBuild:
    """Load the operators.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    found = interface()
    if not hasattr(found, _DECODE):
        raise ImportError(f"{_MODULE} has no {_DECODE}: another vLLM than this was written for")
    return VendorBuild(version=installed_version(SPEC.distributions), kernel_lse_base="e")
