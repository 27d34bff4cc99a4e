"""The kernels of this distribution: found without loading, loaded when a layer needs them.

They are a package of their own, `attn_cpu_kernels`, which a wheel that was built without a compiler
or without torch does not have.
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType

import torch

from attn_cpu import __version__
from attn_cpu._fakes import register_fakes
from attn_cpu._levels import IsaLevel, levels_of
from attn_cpu._ops import missing_ops
from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import build_flags, import_library, require

__all__ = ["OLDEST_TORCH", "SPEC", "load", "probe"]

SPEC = VendorSpec(
    name="attn_cpu_kernels",
    distributions=(),  # attn-cpu is there with and without them: the package is the sign
    module="attn_cpu_kernels",
    install="pip install scikit-build-core cmake ninja && ATTN_CPU_KERNELS=required pip install "
    "--no-build-isolation --no-deps --force-reinstall attn-cpu (it builds them with a C++ compiler "
    "and torch 2.10 or newer)",
    probe="attn_cpu._vendor.attn_cpu_kernels:probe",
)

OLDEST_TORCH = (2, 10)
"""The first release with the stable ABI that the kernels use."""


@cache
def load() -> ModuleType:
    """Load the library into torch, once per process, and return the package that holds it.

    Raises:
        ImportError: it is not installed, of another version, of other sources, or torch is too old
            or refuses it.
    """
    _require_torch(torch.__version__)
    kernels = import_library(SPEC.module)
    library = require(kernels, "LIBRARY", "the package is not the one that attn-cpu builds")
    if kernels.__version__ != __version__:
        raise ImportError(
            f"the kernels are of attn-cpu {kernels.__version__}, and this is {__version__}: build "
            f"them again by {SPEC.install}"
        )
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        # torch says only which library; the loader's own words are the cause.
        raise ImportError(
            f"torch {torch.__version__} does not load kernels that were built with torch "
            f"{kernels.TORCH}: {error.__cause__ or error}"
        ) from error
    _require_ops(str(library))
    register_fakes()
    return kernels


def _require_ops(library: str) -> None:
    """Refuse a library that lacks an op."""
    if missing := missing_ops():
        raise ImportError(
            f"{library} lacks {', '.join(missing)}: it was built from other sources than the "
            f"Python files of attn-cpu {__version__}; reinstall by {SPEC.install}"
        )


def _require_torch(version: str) -> None:
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"the kernels need torch {wanted} or newer, and this is {version}")


def probe() -> VendorBuild:
    """Load the library and describe it: levels built, those of this CPU, the compiler.

    Raises:
        ImportError: as `load`.
    """
    kernels = load()
    ops = torch.ops.attn_cpu
    supported = levels_of(ops.isa_supported(ops.cpu_features()))
    has_tiles = IsaLevel.AMX_BF16 not in supported or ops.amx_permission()
    usable = [level for level in supported if has_tiles or level is not IsaLevel.AMX_BF16]
    return VendorBuild(
        version=kernels.__version__,
        flags=build_flags(
            {
                "amx_permission": IsaLevel.AMX_BF16 in usable,
                "compiler": kernels.COMPILER,
                "isa": max(usable).label,
                "isa_built": " ".join(level.label for level in levels_of(ops.isa_built())),
                "isa_supported": " ".join(level.label for level in supported),
                "sanitized": kernels.IS_SANITIZED,
                "torch": kernels.TORCH,
            }
        ),
        kernel_lse_base="e",
    )
