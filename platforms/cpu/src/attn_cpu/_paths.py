"""On which level of instructions CPU_ATTN runs a request, for people to read."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from attn_cpu._calls import LIBRARY
from attn_cpu._levels import IsaLevel
from attn_shared.kernel_paths import KernelPath

if TYPE_CHECKING:
    from attn_shared.device import DeviceFacts
    from attn_shared.inventory import Inventory
    from attn_shared.request import AttentionRequest

__all__ = ["kernel_paths_of"]

# What a level needs (csrc/isa.cpp), as far as `DeviceFacts.isa` tells: VBMI, which amx_bf16 needs
# too, is in every CPU with tiles.
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_NEEDS = MappingProxyType(
    {
        IsaLevel.NEON: ("asimd",),
        IsaLevel.AMX_BF16: (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
        IsaLevel.AVX512_BF16: (*_AVX512, "avx512_bf16"),
        IsaLevel.AVX512: _AVX512,
        IsaLevel.AVX2: ("avx2", "fma", "f16c"),
    }
)

_OTHERS = MappingProxyType(
    {
        IsaLevel.GENERIC: "vectors of 4 lanes",
        IsaLevel.NEON: "vectors of 4 lanes",
        IsaLevel.AVX2: "vectors of 8 lanes",
    }
)
_BFLOAT16 = MappingProxyType(
    {
        IsaLevel.AVX512_BF16: "queries times keys by pairs of bfloat16",
        IsaLevel.AMX_BF16: "products on AMX tiles",
    }
)


def kernel_paths_of(
    request: AttentionRequest, device: DeviceFacts, inventory: Inventory
) -> tuple[KernelPath, ...]:
    """Return the one way of a request: level and arithmetic.

    Args:
        request: any.
        device: its instruction sets decide where the library was not asked.
        inventory: has the level that the library found here.
    """
    build = inventory.get(LIBRARY).build
    name = None if build is None else build.flag("isa")
    if name is not None:
        level, why = IsaLevel[name.upper()], "the best that was built and runs here"
    else:
        fitting = (level for level, needs in _NEEDS.items() if set(needs) <= set(device.isa))
        level = next(fitting, IsaLevel.GENERIC)
        why = f"the best for the instruction sets of {device.name}"
    how = _OTHERS.get(level, "vectors of 16 lanes")
    if request.dtype is torch.bfloat16:
        how = _BFLOAT16.get(level, how)
    return (KernelPath(rows="all rows", kernel=f"level {level.label}, {how}", why=why),)
