"""TRITON_ATTN's step, as the layers of a group read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from attn_triton._overlap import SideStream
from attn_triton._prompts import PromptGrid
from attn_triton._steps import DecodeGrid, Shape, shape_of
from attn_triton._visibility import Visibility

__all__ = ["Launch", "Step", "TritonAttentionMetadata"]

_ALIGNMENT = 15  # bits of an address that must be 0 for the widest accesses


class Launch(NamedTuple):
    """What one kernel is handed that is the same for all layers.

    Attributes:
        grid: programs.
        tensors: in the kernel's order, after those of the call.
        addresses: of the tensors.
        numbers: in the kernel's order, after the tensors of the layer.
    """

    grid: tuple[int, int, int]
    tensors: tuple[Tensor | None, ...]
    addresses: tuple[int | None, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(
        cls, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[int, ...]
    ) -> Launch:
        """Return it with the tensors' addresses."""
        addresses = tuple(None if each is None else each.data_ptr() for each in tensors)
        return cls((programs, 1, 1), tensors, addresses, numbers)

    @property
    def is_aligned(self) -> bool:
        """Whether every tensor is at a multiple of 16 bytes."""
        return not any(address & _ALIGNMENT for address in self.addresses if address)


class Step(NamedTuple):
    """The launches of layers of one visibility.

    Attributes:
        decode, combine, prefill: what each kernel is handed; None: it does not run.
        presence: whether requests are cut into parts, and whether there are multimodal ranges:
            which pointers are None, for finding compiled handles.
        is_aligned: every tensor is at a multiple of 16 bytes.
    """

    decode: Launch | None
    combine: Launch | None
    prefill: Launch | None
    presence: tuple[bool, bool]
    is_aligned: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TritonAttentionMetadata:
    """One step, as the layers of a group read it.

    Attributes:
        num_actual_tokens: query rows that belong to requests.
        num_keys: keys that a cache-free call brings; 0 with a cache.
        num_reqs: B.
        query_start_loc: (B + 1,) int32.
        key_lens: (B,) int32 keys of each request; of a cache-free call (B + 1,) prefix sums.
        block_table: (B, M) int32, or None.
        causal: 0 no, 1 yes, 2 by request.
        causal_flags: (B,) bytes, with causal=2.
        ranges: (B, R, 2) int32 positions that see each other, or None.
        plans: work items for each visibility among the layers.
        decode: how the decode kernel runs, or None.
        num_blocks: blocks of query rows of the prefill kernel, at most.
        prompts: how the kernel for long prompts runs, where the prefill kernel need not; or None.
        shape: what machine code depends on.
        parts: float32 memory for parts of requests.
        stats: float32 memory for their maxima and sums.
        num_kv_heads: of a layer.
        side: the stream on which decodes run beside prompts; None: they follow them.
    """

    num_actual_tokens: int
    num_keys: int
    num_reqs: int
    query_start_loc: Tensor
    key_lens: Tensor
    block_table: Tensor | None
    causal: int
    causal_flags: Tensor | None
    ranges: Tensor | None
    plans: Mapping[Visibility, Tensor]
    decode: DecodeGrid | None
    num_blocks: int
    prompts: PromptGrid | None
    shape: Shape
    parts: Tensor
    stats: Tensor
    num_kv_heads: int
    side: SideStream | None = None
    _steps: dict[Visibility, Step] = field(init=False, repr=False, default_factory=dict)
    _alone: dict[tuple[Visibility, bool], tuple[Shape, Step]] = field(
        init=False, repr=False, default_factory=dict
    )
    _prompt_launches: dict[int, Launch] = field(init=False, repr=False, default_factory=dict)

    def step(self, visibility: Visibility) -> Step | None:
        """Return the launches of layers of one visibility; None where none was planned for it."""
        found = self._steps.get(visibility)
        if found is None and visibility in self.plans:
            found = self._steps[visibility] = self._step(self.plans[visibility])
        return found

    def decode_alone(self, visibility: Visibility, step: Step) -> tuple[Shape, Step]:
        """Return `shape` and a step, from `step`, without the prefill kernel."""
        found = self._alone.get((visibility, True))
        if found is None:
            shape = shape_of(self.shape.decode, self.shape.blocks, None)
            found = shape, step._replace(prefill=None)
            self._alone[visibility, True] = found
        return found

    def prefill_alone(self, visibility: Visibility, step: Step) -> tuple[Shape, Step]:
        """Return `shape` and a step, from `step`, without the kernels of decodes."""
        found = self._alone.get((visibility, False))
        if found is None:
            shape = shape_of(None, 0, self.shape.prefill)
            found = shape, step._replace(decode=None, combine=None)
            self._alone[visibility, False] = found
        return found

    def _step(self, plan: Tensor) -> Step:
        decode, combine, prefill = None, None, None
        if self.num_reqs and self.decode is not None:
            decode = self._decode_launch(plan, self.decode)
            combine = self._combine_launch(plan, self.decode) if self.decode.may_split else None
        if self.num_reqs and self.num_blocks:
            prefill = self._prefill_launch(plan)
        launches = (decode, combine, prefill)
        return Step(
            *launches,
            presence=(combine is not None, self.ranges is not None),
            is_aligned=all(launch.is_aligned for launch in launches if launch is not None),
        )

    def _decode_launch(self, plan: Tensor, grid: DecodeGrid) -> Launch:
        return Launch.of(
            grid.max_items * self.num_kv_heads * grid.blocks,
            (
                self.parts if grid.may_split else None,
                self.stats if grid.may_split else None,
                plan,
                self.block_table,
                self.causal_flags,
            ),
            (self.num_reqs, grid.max_items, grid.max_rows, self._table_stride),
        )

    def _combine_launch(self, plan: Tensor, grid: DecodeGrid) -> Launch:
        return Launch.of(
            self.num_reqs * self.num_kv_heads * grid.max_rows,
            (self.parts, self.stats, plan, self.query_start_loc),
            (self.num_reqs, grid.max_items, grid.max_rows),
        )

    def _prefill_launch(self, plan: Tensor) -> Launch:
        return Launch.of(
            self.num_blocks * self.num_kv_heads,
            (
                plan,
                self.block_table,
                self.key_lens,
                self.query_start_loc,
                self.causal_flags,
                self.ranges,
            ),
            (
                self.num_reqs,
                self.max_items,
                self._table_stride,
                0 if self.ranges is None else self.ranges.shape[1],
            ),
        )

    def prompt_launch(self, grid: PromptGrid, num_heads: int) -> Launch:
        """Return what the kernel for long prompts is handed in each layer of so many heads."""
        found = self._prompt_launches.get(num_heads)
        if found is None:
            found = self._prompt_launches[num_heads] = Launch.of(
                grid.programs(num_heads),
                (
                    grid.blocks,
                    self.block_table,
                    self.key_lens,
                    self.query_start_loc,
                    self.causal_flags,
                ),
                (self.num_reqs, grid.section_heads, self._table_stride),
            )
        return found

    @property
    def _table_stride(self) -> int:
        return 0 if self.block_table is None else self.block_table.stride(0)

    @property
    def max_items(self) -> int:
        """Records that the plans have room for."""
        return 0 if self.decode is None else self.decode.max_items
