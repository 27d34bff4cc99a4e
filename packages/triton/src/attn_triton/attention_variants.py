"""How the attention kernels are launched on an architecture, for compiling them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attn_shared.arch import parse_arch
from attn_triton.machine import has_dependent_launch
from attn_triton.tiles import (
    COMBINE_PARTS,
    Tile,
    Widths,
    combine_warps,
    decode_tiles,
    prefill_tile,
)
from attn_triton.variants import KernelVariant

__all__ = [
    "E4M3_OF",
    "ELEMENT_BYTES",
    "combine_variants",
    "decode_variants",
    "plan_variants",
    "prefill_variants",
]

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1, "fp8e4b8": 1, "fp8e5": 1, "i8": 1}
_INTEGERS = ("plan_ptr", "table_ptr", "lens_ptr", "query_starts", "ranges_ptr")
_NUMBERS = ("scale", "v_scale", "cap")
_OPTIONAL = (
    "lse_ptr",
    "causal_ptr",
    "ranges_ptr",
    "sinks_ptr",
    "slopes_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
)
E4M3_OF = {
    **dict.fromkeys(("sm_90", "sm_100", "sm_120", "gfx950", "gfx1201"), "fp8e4nv"),
    "gfx942": "fp8e4b8",
}
"""The flavour of e4m3 that an architecture reads; the others have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer and a batch, in what the machine code depends on.

    Attributes:
        name: of the variant.
        sizes: D and Dv.
        element: of queries, in Triton's words.
        cache: of keys and values; None: as queries.
        rows: query rows of one kv head that a request has at most.
        has_parts: requests may be cut.
        has_all: every optional pointer is there, and so are window, softcap and causality by
            request.
        is_full: the wave has many programs.
        is_main: what a serving step usually runs.
    """

    name: str
    sizes: tuple[int, int] = (128, 128)
    element: str = "bf16"
    cache: str | None = None
    rows: int = 4
    has_parts: bool = True
    has_all: bool = False
    is_full: bool = False
    is_main: bool = False
    page: int = 16

    @property
    def stored(self) -> str:
        """Type of a cache element."""
        return self.cache or self.element

    @property
    def widths(self) -> Widths:
        """What tiles depend on."""
        return Widths(
            head_size=self.sizes[0],
            head_size_v=self.sizes[1],
            element_bytes=ELEMENT_BYTES[self.element],
            cache_bytes=ELEMENT_BYTES[self.stored],
            is_fp8=self.stored.startswith("fp8"),
        )


def _layers(arch: str) -> Iterator[_Layer]:
    main = _Layer(name="bf16-d128", is_main=True)
    yield main
    for size in (64, 256):
        yield replace(main, name=f"bf16-d{size}", sizes=(size, size), is_main=size == 64)
    yield replace(main, name="bf16-d96", sizes=(96, 96), is_main=False)
    yield replace(main, name="bf16-d192-d128", sizes=(192, 128), is_main=False)
    yield replace(main, name="bf16-d512", sizes=(512, 512), is_main=False)
    yield replace(main, name="fp16-d128", element="fp16", is_main=False)
    yield replace(main, name="float32-d64", element="fp32", sizes=(64, 64), is_main=False)
    yield replace(main, name="bf16-d128-every-feature", has_all=True, is_main=False)
    yield replace(main, name="bf16-d128-e5m2", cache="fp8e5", is_main=False)
    yield replace(main, name="bf16-d128-int8", cache="i8", has_all=True, is_main=False)
    if arch in E4M3_OF:
        yield replace(main, name="bf16-d128-e4m3", cache=E4M3_OF[arch], is_main=False)


def decode_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how few query tokens are attended for."""
    for layer in _layers(arch):
        yield _decode(kernel, arch, layer)
    main = _Layer(name="bf16-d128", is_main=True)
    full = replace(main, name="bf16-d128-full-wave", is_full=True, has_parts=False)
    yield _decode(kernel, arch, full)
    yield _decode(kernel, arch, replace(main, name="bf16-d128-4-tokens", rows=16))
    yield _decode(kernel, arch, replace(main, name="bf16-d128-64-rows", rows=64, is_main=False))


def prefill_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how many query tokens are attended for.

    The main shapes of Hopper spill between their loops: they are held to the registers that let two
    programs share a multiprocessor, which is worth more than it costs.
    """
    for layer in _layers(arch):
        yield _prefill(kernel, arch, replace(layer, is_main=layer.is_main and arch != "sm_90"))
    yield _prefill(kernel, arch, _Layer(name="bf16-d128-no-cache", page=0))


def combine_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how parts are merged, on every architecture alike."""
    is_dependent = has_dependent_launch(parse_arch(arch))
    for size, padded in ((128, 128), (96, 128), (512, 512)):
        constants = {
            "HQ": 32,
            "HK": 8,
            "DV": size,
            "DVP": padded,
            "BV": padded,
            "PARTS": COMBINE_PARTS,
            "O_TOKEN": 32 * size,
            "O_HEAD": size,
            "PDL": is_dependent,
        }
        yield KernelVariant(
            name=f"combine-bf16-d{size}",
            kernel=kernel,
            signature=_signature(kernel, constants, _Layer(name="combine")),
            constants=constants,
            num_warps=combine_warps(padded),
            is_main=size == 128,
        )


def plan_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how a step is planned, on every architecture alike."""
    del arch
    changed: dict[str, dict[str, object]] = {
        "plain": {},
        "window": {"LEFT": 127},
        "invariant": {"MAX_PARTS": 8},
        "dense": {"DENSE": True},
    }
    for name, changes in changed.items():
        constants = {
            "LEFT": -1,
            "CHUNK": 0,
            "DENSE": False,
            "TILE": 64,
            "MAX_PARTS": 0,
            "LEAST": 8,
            "BLOCK_B": 256,
            **changes,
        }
        yield KernelVariant(
            name=f"plan-{name}",
            kernel=kernel,
            signature=_signature(kernel, constants, _Layer(name="plan")),
            constants=constants,
            is_main=name == "plain",
        )


def _decode(kernel: Any, arch: str, layer: _Layer) -> KernelVariant:
    tile = decode_tiles(parse_arch(arch), layer.widths, layer.rows)[layer.is_full]
    absent = () if layer.has_parts else ("part_ptr", "stat_ptr")
    own = {"BLOCKS": -(-layer.rows // tile.rows), "PDL": has_dependent_launch(parse_arch(arch))}
    constants = _constants(layer, tile) | own
    return KernelVariant(
        name=f"decode-{layer.name}",
        kernel=kernel,
        signature=_signature(kernel, constants, layer, absent),
        constants=constants,
        num_warps=tile.num_warps,
        is_main=layer.is_main,
    )


def _prefill(kernel: Any, arch: str, layer: _Layer) -> KernelVariant:
    tile = prefill_tile(parse_arch(arch), layer.widths)
    options = {}
    if tile.max_registers is not None and not layer.has_all:
        options["maxnreg"] = tile.max_registers
    constants = _constants(layer, tile)
    return KernelVariant(
        name=f"prefill-{layer.name}",
        kernel=kernel,
        signature=_signature(kernel, constants, layer),
        constants=constants,
        num_warps=tile.num_warps,
        is_main=layer.is_main,
        options=options,
    )


def _constants(layer: _Layer, tile: Tile) -> dict[str, object]:
    size, size_v = layer.sizes
    padded, padded_v = layer.widths.padded
    key, value = ((max(layer.page, 1) * 16 * each, 8 * each, each) for each in layer.sizes)
    names = ("K_BLOCK", "K_TOKEN", "K_HEAD", "V_BLOCK", "V_TOKEN", "V_HEAD")
    return {
        "HQ": 32,
        "HK": 8,
        "D": size,
        "DV": size_v,
        "DP": padded,
        "DVP": padded_v,
        "ROWS": tile.rows,
        "BN": tile.keys,
        "STAGES": tile.stages,
        "PAGE": layer.page,
        "Q_TOKEN": 32 * size,
        "Q_HEAD": size,
        "O_TOKEN": 32 * size_v,
        "O_HEAD": size_v,
        **dict(zip(names, (*key, *value), strict=True)),
        "LEFT": 127 if layer.has_all else -1,
        "RIGHT": -1,
        "CHUNK": 0,
        "CAUSAL": 2 if layer.has_all else int(layer.page > 0),
        "SOFTCAP": layer.has_all,
        "SCALES": 2 if layer.stored.startswith("fp8") else 0,
        "INT8": layer.stored == "i8",
    }


def _signature(
    kernel: Any, constants: Mapping[str, object], layer: _Layer, absent: tuple[str, ...] = ()
) -> Mapping[str, str]:
    """Return the types of a kernel's run-time parameters: all that are no constants."""
    if not layer.has_all:
        scales = ("k_scale_ptr", "v_scale_ptr") if layer.stored.startswith("fp8") else ()
        absent = (*absent, *(name for name in _OPTIONAL if name not in scales))
    types = {
        **dict.fromkeys(_INTEGERS, "*i32"),
        **dict.fromkeys(_NUMBERS, "fp32"),
        **dict.fromkeys(("q_ptr", "out_ptr"), f"*{layer.element}"),
        **dict.fromkeys(("k_ptr", "v_ptr"), f"*{layer.stored}"),
        "causal_ptr": "*u8",
        **dict.fromkeys(absent, "constexpr"),
    }
    names = [name for name in kernel.arg_names if name not in constants]
    return {name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names}
