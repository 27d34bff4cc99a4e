"""How the kernels over latents are launched on an architecture, to compile them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from attn_shared.arch import parse_arch
from attn_triton.attention_variants import E4M3_OF, ELEMENT_BYTES
from attn_triton.latent_tiles import COMBINE_ROWS, LatentWidths, latent_row, latent_tile
from attn_triton.machine import has_dependent_launch
from attn_triton.tiles import Tile
from attn_triton.variants import GLUON_LAYOUT, KernelVariant

__all__ = ["combine_rows_variants", "hopper_variants", "mla_decode_variants"]

_INTEGERS = ("plan_ptr", "table_ptr", "lens_ptr", "query_starts")
_FLOATS = ("scale", "cache_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer and a batch, in what the machine code depends on.

    Attributes:
        name: of the variant.
        heads: query heads.
        tokens: query tokens of a request at most.
        sizes: latent and rope part.
        element: of queries, in Triton's words.
        cache: of entries.
        page: tokens per block.
        is_main: what a serving step usually runs.
    """

    name: str
    heads: int = 16
    tokens: int = 1
    sizes: tuple[int, int] = (512, 64)
    element: str = "bf16"
    cache: str = "bf16"
    page: int = 64
    is_main: bool = False

    @property
    def widths(self) -> LatentWidths:
        """What tiles depend on."""
        return LatentWidths(
            latent=self.sizes[0],
            rope=self.sizes[1],
            element_bytes=ELEMENT_BYTES[self.element],
            cache_bytes=ELEMENT_BYTES[self.cache],
        )


def _layers(arch: str) -> Iterator[_Layer]:
    # A wave of RDNA has no room for sums over 512 columns: right there, and not fast.
    main = _Layer(name="16-heads", is_main=not parse_arch(arch).family.startswith("rdna"))
    yield main
    yield replace(main, name="128-heads", heads=128)
    yield replace(main, name="16-heads-page16", page=16)
    yield replace(main, name="16-heads-8-tokens", tokens=8, is_main=False)
    yield replace(main, name="fp16-16-heads", element="fp16", cache="fp16", is_main=False)
    yield replace(main, name="256-32-16-heads", sizes=(256, 32), is_main=False)
    small = replace(main, name="float32-64-16", sizes=(64, 16), is_main=False)
    yield replace(small, element="fp32", cache="fp32")
    if arch in E4M3_OF:
        yield replace(main, name="e4m3-16-heads", cache=E4M3_OF[arch], is_main=False)
        yield replace(main, name="e4m3-128-heads", cache=E4M3_OF[arch], heads=128, is_main=False)


def mla_decode_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how few query tokens are attended for."""
    row = latent_row(parse_arch(arch).family)
    for layer in _layers(arch):
        tile = latent_tile(parse_arch(arch), layer.widths, layer.heads * layer.tokens)
        is_described = layer.page % tile.keys == 0 and layer.element != "fp32"
        descriptors = {}
        if row.has_descriptors and is_described:
            descriptors = _descriptors(layer, tile, "")
        early = {"PDL": has_dependent_launch(parse_arch(arch))}
        yield _variant(kernel, layer, tile, descriptors, early)


def hopper_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how many rows are attended for on Hopper, and nothing elsewhere."""
    if parse_arch(arch).family != "hopper":
        return
    main = _Layer(name="hopper-128-heads", heads=128, is_main=True)
    for layer in (main, replace(main, name="hopper-fp16", element="fp16", cache="fp16")):
        tile = latent_tile(parse_arch(arch), layer.widths, layer.heads)
        yield _variant(kernel, layer, tile, _descriptors(layer, tile, f",{GLUON_LAYOUT}"))


def combine_rows_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how parts of many rows are merged, on every architecture alike."""
    del arch
    constants = {
        "HQ": 128,
        "DV": 512,
        "DVP": 512,
        "ROWS": COMBINE_ROWS,
        "O_TOKEN": 128 * 512,
        "O_HEAD": 512,
    }
    types = {**dict.fromkeys(_INTEGERS, "*i32"), "out_ptr": "*bf16", "lse_ptr": "constexpr"}
    names = [name for name in kernel.arg_names if name not in constants]
    yield KernelVariant(
        name="combine-rows-bf16-d512",
        kernel=kernel,
        signature={
            name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names
        },
        constants=constants,
    )


def _descriptors(layer: _Layer, tile: Tile, layout: str) -> dict[str, str]:
    names = ("latent_tiles", "rope_tiles")
    return {
        name: f"tensordesc<{layer.cache}[{tile.keys}, {width}]{layout}>"
        for name, width in zip(names, layer.widths.padded, strict=True)
    }


def _variant(
    kernel: Any,
    layer: _Layer,
    tile: Tile,
    descriptors: dict[str, str],
    own: Mapping[str, object] = MappingProxyType({}),
) -> KernelVariant:
    (latent, rope), (padded, padded_rope) = layer.sizes, layer.widths.padded
    width = latent + rope
    constants: dict[str, object] = {
        "HQ": layer.heads,
        "DL": latent,
        "DR": rope,
        "DLP": padded,
        "DRP": padded_rope,
        "ROWS": tile.rows,
        "BN": tile.keys,
        "STAGES": tile.stages,
        "PAGE": layer.page,
        "Q_TOKEN": layer.heads * width,
        "Q_HEAD": width,
        "O_TOKEN": layer.heads * latent,
        "O_HEAD": latent,
        "K_BLOCK": layer.page * width,
        "K_TOKEN": width,
        "CAUSAL": 1,
        **own,
    }
    types = {
        **dict.fromkeys(_INTEGERS, "*i32"),
        **dict.fromkeys(_FLOATS, "fp32"),
        **dict.fromkeys(("q_ptr", "out_ptr"), f"*{layer.element}"),
        **dict.fromkeys(("latent_tiles", "rope_tiles", "scale_ptr", "lse_ptr"), "constexpr"),
        "cache_ptr": f"*{layer.cache}",
        **descriptors,
    }
    names = [name for name in kernel.arg_names if name not in constants]
    return KernelVariant(
        name=f"mla-decode-{layer.name}",
        kernel=kernel,
        signature={
            name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names
        },
        constants=constants,
        num_warps=tile.num_warps,
        is_main=layer.is_main,
    )
