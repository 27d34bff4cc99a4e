"""How prefills over latents are launched on Hopper, to compile them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attn_shared.arch import parse_arch
from attn_triton.mla_prompt_tiles import GROUP_ROWS, mla_prompt_tile
from attn_triton.variants import GLUON_LAYOUT, KernelVariant

__all__ = ["mla_prompt_variants"]

_HEADS = 128
_NOPE, _ROPE, _VALUE = 128, 64, 128
_INTEGERS = ("blocks_ptr", "query_starts", "key_starts")


def mla_prompt_variants(kernel: Any, arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched; nothing elsewhere than on Hopper.

    A group has all registers that there are: 16 bytes are spilled between its loops, none in them.
    """
    if parse_arch(arch).family != "hopper":
        return
    yield _variant(kernel, "bf16", is_causal=True, is_apart=True)
    yield _variant(kernel, "bf16", is_causal=False, is_apart=True)
    yield _variant(kernel, "fp16", is_causal=True, is_apart=False)


def _variant(kernel: Any, element: str, *, is_causal: bool, is_apart: bool) -> KernelVariant:
    tile = mla_prompt_tile()
    key = _NOPE + _VALUE if is_apart else _NOPE + _ROPE
    constants: dict[str, object] = {
        "HQ": _HEADS,
        "BN": tile.keys,
        "STAGES": tile.stages,
        "CAUSAL": is_causal,
        "Q_HEAD": _NOPE + _ROPE,
        "K_HEAD": key,
        "R_HEAD": 0 if is_apart else key,
        "V_HEAD": _NOPE + _VALUE,
        "O_TOKEN": _HEADS * _VALUE,
        "O_HEAD": _VALUE,
    }
    tiles = {
        "q_tiles": (GROUP_ROWS, _NOPE),
        "q_rope_tiles": (GROUP_ROWS, _ROPE),
        "k_tiles": (tile.keys, _NOPE),
        "rope_tiles": (tile.keys, _ROPE),
        "v_tiles": (tile.keys, _VALUE),
        "out_tiles": (GROUP_ROWS, _VALUE),
    }
    types = {
        **{
            name: f"tensordesc<{element}[{rows}, {columns}],{GLUON_LAYOUT}>"
            for name, (rows, columns) in tiles.items()
        },
        **dict.fromkeys(_INTEGERS, "*i32"),
        "out_ptr": f"*{element}",
        "lse_ptr": "*fp32",
        "scale": "fp32",
    }
    names = [name for name in kernel.arg_names if name not in constants]
    kind = "causal" if is_causal else "earlier-keys"
    return KernelVariant(
        name=f"mla-prompt-hopper-{element}-{kind}",
        kernel=kernel,
        signature={name: types.get(name, "i32") for name in names},
        constants=constants,
        is_main=False,
    )
