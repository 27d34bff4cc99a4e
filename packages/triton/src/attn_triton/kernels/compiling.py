"""Compile a jitted function for what its arguments are, without JIT's look at each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

from attn_triton.variants import KernelVariant

__all__ = [
    "Kind",
    "compile_kernel",
    "compile_variant",
    "current_arch",
    "driver_calls",
    "has_gluon",
    "is_interpreted",
    "kind_of",
    "launch_call",
    "make_launcher",
    "target_of",
    "type_names",
]

_WARP_SIZES = {"gfx9": 64}  # CDNA; every other GPU that Triton compiles for here has 32
_FIRST_GLUON = (3, 6)
_WITHOUT_CONSTANTS = ("cuda", "hip")  # whose launchers were seen to take a signature without them
_DIRECT = "3.6."  # where a launcher's C function is known to take its arguments in this order
_ALIGNED = [["tt.divisibility", 16]]
_TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e5m2fnuz: "fp8e5b16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}


class Kind(NamedTuple):
    """What machine code depends on in one run-time argument: its type, and if it is aligned."""

    type_name: str
    is_aligned: bool = False


def is_interpreted(kernel: Any) -> bool:
    """Return whether TRITON_INTERPRET was set when the kernel was made."""
    return isinstance(kernel, InterpretedFunction)


@functools.cache
def type_names(kernel: Any) -> tuple[str, ...]:
    """Return what each parameter is annotated with, in Triton's words; "" for nothing.

    Raises:
        TypeError: a run-time parameter follows a constexpr, which a handle could not place.
    """
    names = ["constexpr" if p.is_constexpr else p.annotation_type for p in kernel.params]
    first = names.index("constexpr") if "constexpr" in names else len(names)
    if any(name != "constexpr" for name in names[first:]):
        raise TypeError(f"{kernel.__name__}: a run-time parameter follows a constexpr one")
    return tuple(names)


def kind_of(argument: object, annotated: str) -> Kind:
    """Return the kind of a run-time argument.

    Args:
        argument: a tensor, a number, None for an absent pointer, or a host tensor descriptor.
        annotated: the parameter's own type, "" for 32 bits.
    """
    if isinstance(argument, torch.Tensor):
        return Kind(f"*{_TYPE_NAMES[argument.dtype]}", argument.data_ptr() % 16 == 0)
    if argument is None:
        return Kind("constexpr")
    if isinstance(argument, int):
        return Kind(annotated or "i32")
    if isinstance(argument, float):
        return Kind(annotated or "fp32")
    base, block = argument.base, argument.block_shape  # type: ignore[attr-defined]
    layout = getattr(argument, "layout", None)  # of Gluon's descriptors alone
    described = "" if layout is None else f",{layout!r}"
    return Kind(f"tensordesc<{_TYPE_NAMES[base.dtype]}{list(block)}{described}>")


def driver_calls() -> tuple[Callable[[int], int], Callable[[], int]]:
    """Return the active driver's calls for the current stream of a device and the device."""
    return driver.active.get_current_stream, driver.active.get_current_device


def has_gluon() -> bool:
    """Return whether kernels in Gluon run: by a Triton in whose form of it they have, compiled."""
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= _FIRST_GLUON and not triton.knobs.runtime.interpret


def current_arch() -> str:
    """Return the architecture of the current device, such as "sm_90" or "gfx942"."""
    target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def target_of(arch: str) -> GPUTarget:
    """Return Triton's target of an architecture such as "sm_90" or "gfx942"."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    is_cdna = arch.startswith("gfx9")
    return GPUTarget("hip", arch, _WARP_SIZES["gfx9"] if is_cdna else 32)


def compile_kernel(
    kernel: Any,
    kinds: Mapping[str, Kind],
    constants: Mapping[str, object],
    *,
    target: GPUTarget | None = None,
    options: Mapping[str, object],
) -> CompiledKernel:
    """Compile a kernel for arguments of these kinds; for the current device without a target.

    No value is looked at: unlike JIT's own launch this takes no integer for a constant 1, and on
    AMD GPUs it does not take small tensors for all that will come.
    """
    places = {name: index for index, name in enumerate(kernel.arg_names)}
    signature, values = {}, {}
    for name in kernel.arg_names:
        signature[name] = kinds[name].type_name if name in kinds else "constexpr"
        if signature[name] == "constexpr":
            values[(places[name],)] = constants.get(name)
    # In the kernel's order, for the cache's key has them in the order in which they are given.
    aligned = [name for name in kernel.arg_names if name in kinds and kinds[name].is_aligned]
    attributes = {(places[name],): _ALIGNED for name in aligned}
    source = _source(kernel)(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=target, options=dict(options))
    if compiled.metadata.target.backend in _WITHOUT_CONSTANTS:
        # What Triton makes its launcher from: each place costs a launch, and the C code of
        # kernels that differ in constants alone is the same.
        run_time = {name: signature[name] for name in kernel.arg_names if name in kinds}
        compiled.src = SimpleNamespace(fn=kernel, signature=run_time, constants={})
    return compiled


def launch_call(
    compiled: CompiledKernel, num_constants: int
) -> tuple[Callable[..., object], tuple[object, ...], tuple[None, ...]]:
    """Return how a kernel is launched: call(x, y, z, stream, *head, *arguments, *tail).

    It loads the machine code. The tail stands for constants, which some launchers skip.

    Args:
        compiled: by `compile_kernel`.
        num_constants: constexpr parameters of the kernel.
    """
    run, backend = compiled.run, compiled.metadata.target.backend
    hooks = (compiled.packed_metadata, None, None, None)
    tail = () if backend in _WITHOUT_CONSTANTS else (None,) * num_constants
    if backend == "cuda" and triton.__version__.startswith(_DIRECT) and not _takes_scratch(run):
        # What Triton's own wrapper of it hands on, with a frame less.
        attributes = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        return run.launch, (compiled.function, *attributes, *hooks), tail
    return run, (compiled.function, *hooks), tail


def _takes_scratch(run: Any) -> bool:
    return bool(run.global_scratch_size or run.profile_scratch_size)


def make_launcher(compiled: CompiledKernel) -> None:
    """Have Triton compile what launches a kernel, for which it makes no context of a device."""
    driver.active.launcher_cls(compiled.src, compiled.metadata)


def _source(kernel: Any) -> Any:
    """Return what Triton compiles a kernel from: Gluon is another language in the same words."""
    if not getattr(kernel, "is_gluon", lambda: False)():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def compile_variant(variant: KernelVariant, arch: str) -> CompiledKernel:
    """Compile a variant for an architecture such as "sm_90" or "gfx942", without a GPU.

    Raises:
        ValueError: its constants and signature are not the kernel's parameters.
    """
    given = sorted([*variant.signature, *variant.constants])
    if given != sorted(variant.kernel.arg_names):
        differing = sorted(set(given) ^ set(variant.kernel.arg_names))
        raise ValueError(f"{variant.name}: {', '.join(differing)} missing, unknown or given twice")
    kinds = {
        name: Kind(type_name, type_name.startswith("*") and name not in variant.unaligned)
        for name, type_name in variant.signature.items()
    }
    options = {"num_warps": variant.num_warps, **variant.options}
    if variant.num_stages is not None:
        options["num_stages"] = variant.num_stages
    return compile_kernel(
        variant.kernel, kinds, variant.constants, target=target_of(arch), options=options
    )
