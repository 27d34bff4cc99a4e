"""TRITON_ATTN under the interpreter with every prompt on the kernel for long ones.

The suite's batches are short and their heads narrow; here tiles are small, and nothing decodes.
"""

from __future__ import annotations

from interpreted_backend import InterpretedBackend

from attn_shared.arch import Arch
from attn_triton import _prompt_plan, _route, _steps
from attn_triton.prompt_tiles import PromptKernel, PromptTile
from attn_triton.tiles import Widths

_TILE = PromptTile(block=16, is_pair=True, keys=16, num_warps=4, stages=2)


def _small_tile(
    arch: Arch,
    widths: Widths,
    *,
    is_few: bool = False,
    kernel: PromptKernel = PromptKernel.PORTABLE,
) -> PromptTile | None:
    sizes = (widths.head_size, widths.head_size_v)
    return _TILE if sizes == widths.padded and kernel is PromptKernel.PORTABLE else None


_route.prompt_tile = _small_tile
_prompt_plan.LEAST_TOKENS = 0
_steps.MAX_DECODE_TOKENS = 0


class PromptBackend(InterpretedBackend):
    name = "TRITON_ATTN_PROMPTS"
