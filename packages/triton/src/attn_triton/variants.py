"""What to compile ahead of time to know that every kernel builds for every GPU.

A kernel module offers `variants(arch)`: the ways in which its kernels are launched there, as data.
`ci/compile_triton.py` compiles them without a GPU and reads registers, spills and shared memory.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ARCHITECTURES", "GLUON_LAYOUT", "KernelVariant", "all_variants"]

ARCHITECTURES = (
    "sm_80",
    "sm_90",
    "sm_100",
    "sm_120",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1201",
)
"""What the kernels are compiled for; Intel's GPUs need a build of Triton that is on no index."""

GLUON_LAYOUT = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
    "fp4_padded=False, cga_layout=[])"
)
"""In shared memory, of tiles of half precision that are 64 columns wide or more, in Gluon's words:
part of their descriptors' types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVariant:
    """One kernel with everything that its machine code depends on.

    Attributes:
        name: unique over the package, such as "decode-bf16-d128".
        kernel: the jitted function.
        signature: types of the run-time parameters in Triton's words, by name: "*bf16", "*fp8e4nv",
            "i32", "i64", "fp32"; "constexpr" for a pointer that is None.
        constants: values of the constexpr parameters, by name.
        num_warps: warps per program.
        num_stages: depth of software pipelining, or None for the compiler's own.
        is_main: what a serving step usually runs; it must not spill.
        unaligned: pointers that are not known to be multiples of 16 bytes.
        options: further options of the compiler.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int | None = None
    is_main: bool = True
    unaligned: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)


def all_variants(arch: str) -> Iterator[KernelVariant]:
    """Yield the variants of every kernel module for one of `ARCHITECTURES`; imports Triton."""
    package = importlib.import_module("attn_triton.kernels")
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        offered = getattr(module, "variants", None)
        if offered is not None:
            yield from offered(arch)
