"""How the kernels of long prompts are launched on an architecture, for compiling ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attn_shared.arch import parse_arch
from attn_triton._prompts import COPIED_TOKENS
from attn_triton._route import Context, Fresh, tile_within
from attn_triton.prompt_tiles import PromptKernel, PromptTile, prompt_tile
from attn_triton.tiles import Widths
from attn_triton.variants import GLUON_LAYOUT, KernelVariant

__all__ = [
    "block_variants",
    "copy_variants",
    "hopper_prompt_variants",
    "prompt_variants",
    "variant_of",
]

_PAGE = 64
_SCALES: tuple[str, ...] = ("k_scale_ptr", "v_scale_ptr")
_FEATURES = ("lse_ptr", "causal_ptr", "sinks_ptr")
_INTEGERS = ("blocks_ptr", "table_ptr", "lens_ptr", "query_starts")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """A layer and a batch, in what the machine code depends on.

    Attributes:
        name: of the variant.
        size: D and Dv.
        element: in Triton's words.
        context: where keys of earlier steps are.
        fresh: which keys come with the call.
        causal: 0, 1, or 2 for by request.
        left: keys that a window leaves to the left.
        has_all: sinks, LSE and softcap.
        is_few: one wave holds all programs.
        is_main: what a serving step usually runs.
    """

    name: str
    size: int = 128
    element: str = "bf16"
    context: Context = Context.NONE
    fresh: Fresh = Fresh.STEP
    causal: int = 1
    left: int = -1
    has_all: bool = False
    is_few: bool = False
    is_main: bool = False

    @property
    def widths(self) -> Widths:
        """What tiles depend on."""
        return Widths(head_size=self.size, head_size_v=self.size, element_bytes=2, cache_bytes=2)


def _prompts() -> Iterator[_Prompts]:
    main = _Prompts(name="bf16-d128", is_main=True)
    yield main
    yield replace(main, name="bf16-d128-pages", context=Context.PAGES)
    yield replace(main, name="bf16-d128-rows", context=Context.ROWS)
    rest = replace(main, is_main=False)
    yield replace(rest, name="bf16-d128-few", is_few=True)
    yield replace(rest, name="bf16-d128-stored", context=Context.PAGES, fresh=Fresh.NONE)
    yield replace(rest, name="bf16-d64", size=64)
    yield replace(rest, name="bf16-d256", size=256)
    yield replace(rest, name="fp16-d128", element="fp16")
    yield replace(rest, name="bf16-d128-window", left=1023)
    yield replace(rest, name="bf16-d128-encoder", fresh=Fresh.ALL, causal=0)
    yield replace(
        rest,
        name="bf16-d128-every-feature",
        context=Context.PAGES,
        causal=2,
        left=127,
        has_all=True,
    )


def prompt_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how long prompts are attended for, where there are tiles for that.

    The main shapes of Hopper take all registers, so that two programs share a multiprocessor: they
    spill 16 to 64 bytes between their loops, none in the loop over keys of earlier steps or,
    without those, over the step's own.
    """
    for prompts in _prompts():
        tile = prompt_tile(parse_arch(arch), prompts.widths, is_few=prompts.is_few)
        if tile is not None:
            yield variant_of(
                kernel, replace(prompts, is_main=prompts.is_main and arch != "sm_90"), tile
            )


def _hopper_prompts() -> Iterator[_Prompts]:
    main = _Prompts(name="bf16-d128", is_main=True)
    yield main
    rest = replace(main, is_main=False)
    yield replace(rest, name="bf16-d128-pages", context=Context.PAGES)
    yield replace(rest, name="bf16-d128-rows", context=Context.ROWS)
    yield replace(rest, name="bf16-d128-stored", context=Context.PAGES, fresh=Fresh.NONE)
    yield replace(rest, name="bf16-d128-encoder", fresh=Fresh.ALL, causal=0)
    yield replace(rest, name="fp16-d128", element="fp16")
    yield replace(rest, name="bf16-d256", size=256)


def hopper_prompt_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield the same for the kernel for Hopper, and nothing elsewhere."""
    for prompts in _hopper_prompts():
        tile = prompt_tile(parse_arch(arch), prompts.widths, kernel=PromptKernel.HOPPER)
        if tile is not None and prompts.context is Context.PAGES:
            tile = tile_within(tile, _PAGE)
        if tile is not None:
            yield variant_of(kernel, prompts, tile)


def variant_of(kernel: Any, prompts: _Prompts, tile: PromptTile) -> KernelVariant:
    """Return how a kernel is launched for such a layer and batch."""
    constants = _constants(prompts, tile)
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    absent = _SCALES if prompts.has_all else (*_SCALES, *_FEATURES)
    if prompts.context is Context.NONE:
        absent = (*absent, "k_desc", "v_desc")
    if prompts.context is not Context.PAGES:
        absent = (*absent, "table_ptr")
    if prompts.fresh is Fresh.NONE:
        absent = (*absent, "new_k_desc", "new_v_desc")
    boxes = {"q_desc": (tile.block, prompts.size)}
    if prompts.context is Context.PAGES:
        boxes |= dict.fromkeys(("k_desc", "v_desc"), tile.cached(prompts.size))
    tiles = (tile.keys, prompts.size)
    own = f",{GLUON_LAYOUT}" if tile.kernel is PromptKernel.HOPPER else ""
    types = {
        **dict.fromkeys(_INTEGERS, "*i32"),
        **dict.fromkeys(("scale", "v_scale", "cap"), "fp32"),
        **{
            name: f"tensordesc<{prompts.element}{list(boxes.get(name, tiles))}{own}>"
            for name in ("q_desc", "k_desc", "v_desc", "new_k_desc", "new_v_desc")
        },
        "out_ptr": f"*{prompts.element}",
        "causal_ptr": "*u8",
        **dict.fromkeys(absent, "constexpr"),
    }
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {
        name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names
    }
    return KernelVariant(
        name=f"{kernel.__name__.replace('_', '-')}-{prompts.name}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        num_warps=tile.num_warps,
        is_main=prompts.is_main,
        options={} if tile.max_registers is None else {"maxnreg": tile.max_registers},
    )


def _constants(prompts: _Prompts, tile: PromptTile) -> dict[str, object]:
    size = prompts.size
    is_paged = prompts.context is Context.PAGES
    return {
        "HQ": 32,
        "HK": 8,
        "D": size,
        "DV": size,
        "BLOCK": tile.block,
        "BN": tile.keys,
        "TWO": tile.is_pair,
        "STAGES": tile.stages,
        "STAGED": tile.is_staged,
        "CONTEXT": int(prompts.context),
        "FRESH": int(prompts.fresh),
        "PAGE": _PAGE if is_paged else 0,
        **dict.fromkeys(("Q_HEAD", "O_HEAD", "K_HEAD", "V_HEAD"), size),
        **dict.fromkeys(("NEW_K_HEAD", "NEW_V_HEAD"), size),
        "O_TOKEN": 32 * size,
        **dict.fromkeys(("K_ROWS", "V_ROWS"), 2 * _PAGE if is_paged else 0),
        **dict.fromkeys(("K_HEAD_ROWS", "V_HEAD_ROWS"), 0),
        "LEFT": prompts.left,
        "RIGHT": -1,
        "CHUNK": 0,
        "CAUSAL": prompts.causal,
        "SOFTCAP": prompts.has_all,
        "SCALES": 0,
    }


def block_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how the blocks of a step are listed, where a kernel takes them."""
    if prompt_tile(parse_arch(arch), _Prompts(name="any").widths) is None:
        return
    constants = {"PREFIX": False, "BLOCK_B": 256}
    names = [name for name in kernel.arg_names if name not in constants]
    pointers = ("blocks_ptr", "query_starts", "lens_ptr")
    yield KernelVariant(
        name="prompt-blocks",
        kernel=kernel,
        signature={name: "*i32" if name in pointers else "i32" for name in names},
        constants=constants,
        is_main=True,
    )


def copy_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how small pages are copied to rows, where a kernel takes them."""
    if prompt_tile(parse_arch(arch), _Prompts(name="any").widths) is None:
        return
    strides = {"BLOCK": 2 * 16 * 8 * 128, "TOKEN": 8 * 128, "HEAD": 128}
    constants = {
        **{f"{side}_{name}": stride for side in "KV" for name, stride in strides.items()},
        "HK": 8,
        "D": 128,
        "DV": 128,
        "PAGE": 16,
        "FRESH": True,
        "ROWS": COPIED_TOKENS,
    }
    for stored in ("bf16", "fp8e5"):
        types = {
            **dict.fromkeys(("k_ptr", "v_ptr"), f"*{stored}"),
            **dict.fromkeys(("k_rows", "v_rows"), "*bf16"),
            **dict.fromkeys(_INTEGERS, "*i32"),
        }
        names = [name for name in kernel.arg_names if name not in constants]
        yield KernelVariant(
            name=f"prompt-copy-{stored}",
            kernel=kernel,
            signature={name: types.get(name, "i32") for name in names},
            constants=constants,
            is_main=stored == "bf16",
        )
