"""Launches the prefill over latents for Hopper: blocks listed on the device, few looks per call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn_shared.alignment import aligned
from attn_shared.mla_metadata import RaggedPart
from attn_shared.request import MLADims
from attn_shared.signed_scale import Scale
from attn_shared.spec import BuildConfig, LayerSpec
from attn_triton._prompt_plan import block_listing
from attn_triton._prompts import blocks_size
from attn_triton._rows import Matrix, token_matrix
from attn_triton.launch import AddressedLaunch, Launcher
from attn_triton.machine import Machine
from attn_triton.mla_prompt_tiles import GROUP_ROWS, mla_prompt_tile
from attn_triton.prompt_tiles import section_heads
from attn_triton.tiles import Widths, next_power_of_2

__all__ = ["HopperPrompts", "PromptBlocks", "targets"]

_LOG2E = math.log2(math.e)
_NUM_WARPS = 4  # of the groups that it is launched with; the kernel takes eight more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptBlocks:
    """Blocks of query tokens of one part.

    Attributes:
        blocks: where each request's are, for the kernel.
        count: of all requests.
        section_heads: heads whose keys are walked together.
    """

    blocks: Tensor
    count: int
    section_heads: int


class HopperPrompts:
    """Runs the prefills of one layer.

    Args:
        spec: of the layer.
        config: bounds of the batches.
        device: where it runs.
        machine: what that is.
    """

    def __init__(
        self, spec: LayerSpec, config: BuildConfig, device: torch.device, machine: Machine
    ) -> None:
        self._spec, self._dims = spec, spec.mla or MLADims()
        self._device, self._machine = device, machine
        self._most_requests = config.max_num_seqs
        self._scale = Scale(spec.scale)
        self._tile = mla_prompt_tile()
        self._widths = Widths(
            head_size=self._dims.qk_nope_head_dim + self._dims.qk_rope_head_dim,
            head_size_v=self._dims.v_head_dim,
            element_bytes=spec.dtype.itemsize,
            cache_bytes=spec.dtype.itemsize,
        )
        self._programs: dict[tuple[object, ...], AddressedLaunch] = {}

    def prepare(self, part: RaggedPart) -> PromptBlocks:
        """Have the device list the blocks of a part, the last ones of each request first."""
        starts: list[int] = part.query_start_loc_cpu.tolist()
        rows, num_reqs = self._tile.rows, len(starts) - 1
        count = sum(-(-(stop - start) // rows) for start, stop in pairwise(starts))
        size = blocks_size(num_reqs, count)
        blocks = torch.empty(size, dtype=torch.int32, device=self._device)
        listing = block_listing(True, next_power_of_2(max(num_reqs, self._most_requests, 16)))
        tensors = (blocks, part.query_start_loc, part.key_start_loc)
        listing((1, 1, 1), tensors, (num_reqs, count, 0, rows))
        heads = self._spec.num_heads
        together = section_heads(
            heads, 1, self._widths, part.max_key_len, self._machine.cache_bytes
        )
        return PromptBlocks(blocks=blocks, count=count, section_heads=together)

    def run(
        self,
        query: Tensor,
        nope: Tensor,
        rope: Tensor,
        value: Tensor,
        part: RaggedPart,
        *,
        output: Tensor | None = None,
        returns_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, and return output and LSE as `MLAPrefill.run` does.

        Args:
            query: (T, H, nope + rope), its last dimension dense.
            nope: (Tk, H, nope), keys without their rope part.
            rope: (Tk, H, rope), or (Tk, 1, rope) of all heads.
            value: (Tk, H, v).
            part: prepared here.
            output: (T, H, v) that may be written and returned.
            returns_lse: whether the LSE is wanted.
        """
        query = self._scale.query(query)
        nope, rope, value = aligned(nope), aligned(rope), aligned(value)
        output, lse = targets(query, value, output, returns_lse=returns_lse)
        plan: PromptBlocks = part.plan
        read = [_matrix(each) for each in (query, nope, rope, value)]
        written = token_matrix(output)
        is_shared = rope.shape[1] == 1
        places = tuple(matrix.head_columns for matrix in read)
        key = (places, output.stride(), is_shared, written is None, part.is_causal)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._make(places, output, part.is_causal, is_shared)
        items = plan.count * self._spec.num_heads
        tensors = (
            *self._described((query, nope, rope, value), read),
            None if written is None else self._tiles(output, written, self._dims.v_head_dim),
            *(output, lse, plan.blocks, part.query_start_loc, part.key_start_loc),
        )
        numbers = (len(part.query_start_loc) - 1, plan.section_heads)
        lse_stride = 0 if lse is None else lse.stride(0)
        # A program each: dealt to one for each multiprocessor, the last trips are uneven.
        program((items, 1, 1), tensors, (*numbers, lse_stride, self._scale.value * _LOG2E))
        return output, lse

    def _described(self, tensors: tuple[Tensor, ...], matrices: list[Matrix]) -> tuple[Any, ...]:
        """Return descriptors of the queries' two parts, of the keys' two, and of the values."""
        dims, keys = self._dims, self._tile.keys
        query, nope, rope, value = zip(tensors, matrices, strict=True)
        return (
            self._tiles(*query, dims.qk_nope_head_dim),
            self._tiles(*query, dims.qk_rope_head_dim),
            self._tiles(*nope, dims.qk_nope_head_dim, keys),
            self._tiles(*rope, dims.qk_rope_head_dim, keys),
            self._tiles(*value, dims.v_head_dim, keys),
        )

    def _tiles(self, rows: Tensor, matrix: Matrix, width: int, height: int = GROUP_ROWS) -> Any:
        from attn_triton.kernels.describing_hopper import described_for_hopper

        shape = [len(rows), matrix.columns]
        return described_for_hopper(rows, rows.data_ptr(), shape, matrix.stride, (height, width))

    def _make(
        self, places: tuple[int, ...], output: Tensor, is_causal: bool, is_shared: bool
    ) -> AddressedLaunch:
        from attn_triton.kernels.mla_prompt_hopper import mla_prompt_hopper

        query, nope, rope, value = places
        constants = {
            "HQ": self._spec.num_heads,
            "BN": self._tile.keys,
            "STAGES": self._tile.stages,
            "CAUSAL": is_causal,
            "Q_HEAD": query,
            "K_HEAD": nope,
            "R_HEAD": 0 if is_shared else rope,
            "V_HEAD": value,
            "O_TOKEN": output.stride(0),
            "O_HEAD": output.stride(1),
        }
        return AddressedLaunch(Launcher(mla_prompt_hopper, constants, num_warps=_NUM_WARPS))


def targets(
    query: Tensor, value: Tensor, output: Tensor | None, *, returns_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what a prefill writes to: output (T, H, Dv), and LSE (H, T) float32 if it is wanted.

    Args:
        query: (T, H, D).
        value: (Tk, H, Dv).
        output: (T, H, Dv), taken if its last dimension is dense.
        returns_lse: whether the LSE is wanted.
    """
    if output is None or output.stride(2) != 1:
        output = query.new_empty(*query.shape[:2], value.shape[-1])
    if not returns_lse:
        return output, None
    return output, query.new_empty(query.shape[1], len(query), dtype=torch.float32)


def _matrix(rows: Tensor) -> Matrix:
    """Return how rows that are aligned lie.

    Raises:
        TypeError: heads that are not within a token's row, which no projection leaves.
    """
    found = token_matrix(rows)
    if found is None:
        raise TypeError(f"rows {tuple(rows.shape)} with strides {rows.stride()}")
    return found
