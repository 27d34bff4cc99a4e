"""TRITON_ATTN's builder: grids chosen on the host, work items computed on the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_shared.alignment import dense_rows
from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.checked import check_metadata
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata, MMPrefixRanges
from attn_shared.request import AttentionType
from attn_shared.served import require_batch_served, require_block_table, require_served
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_triton._capability import CAPABILITY, NAME
from attn_triton._metadata import TritonAttentionMetadata
from attn_triton._overlap import SideStream, overlaps
from attn_triton._prompt_plan import PromptPlanner
from attn_triton._prompts import PromptGrid
from attn_triton._steps import (
    MAX_PARTS,
    Composition,
    DecodeGrid,
    Planner,
    Shape,
    composition_of,
    plan_ints,
    query_lens,
    shape_of,
)
from attn_triton._visibility import CACHE_FREE, Visibility, visibility_of
from attn_triton.launch import AlignedLaunch, Launcher
from attn_triton.machine import machine_of
from attn_triton.tiles import next_power_of_2

__all__ = ["TritonAttentionMetadataBuilder", "planning"]

_UNBOUNDED = 2**31 - 1
_HAS_STREAMS = ("cuda",)


class TritonAttentionMetadataBuilder(AttentionMetadataBuilder[TritonAttentionMetadata]):
    """Chooses grids from what the host knows, and has the device compute the work items.

    Nothing is waited for: host lengths may be upper bounds or missing. Layers of one group may
    differ in window and chunks: each visibility gets a plan. Requests may come in any order.

    A step that was built for capture keeps its buffers: a later `build` of as many requests and
    tokens, whose queries are no longer, computes its plan into them, so that the captured graph
    replays with the new lengths.

    Cascade attention computes the same result here as no cascade does: a valid
    `common_prefix_len` is accepted and saves nothing.
    """

    supports_update_block_table = True
    backend_name: ClassVar[str] = NAME

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs.

        Raises:
            UnsupportedOptionError: layers differ in what one plan must share, or one is not served.
        """
        super().__init__(kv_cache_spec, layers, config, device)
        shared = ("attn_type", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype")
        self._layer = require_uniform(layers, shared)
        for layer in layers.values():
            require_served(self.backend_name, CAPABILITY, layer)
        self._is_cache_free = self._layer.attn_type in CACHE_FREE
        self._distinct = {visibility_of(layer): layer for layer in layers.values()}
        cache_dtype = self._read_cache_dtype()
        self._planner = Planner(
            self._layer,
            machine_of(device),
            cache_dtype=cache_dtype,
            is_invariant=config.batch_invariant
            or any(each.batch_invariant for each in layers.values()),
        )
        self._prompts = PromptPlanner(
            layers.values(),
            machine_of(device),
            self._planner,
            cache_dtype,
            device,
            is_cache_free=self._is_cache_free,
            allows_fresh=config.allows_fresh_kv,
        )
        self._side: SideStream | None = None
        self._captured: dict[tuple[int, int], tuple[int, TritonAttentionMetadata]] = {}
        self._nothing = torch.empty(0, dtype=torch.float32, device=device)
        self._scratch = self._nothing

    def _read_cache_dtype(self) -> torch.dtype:
        """Return the dtype of the caches, which all layers share, as their block size."""
        if self._is_cache_free:
            return self._layer.dtype
        group = self.kv_cache_spec
        for name, layer in self.layers.items():
            own = layer.kv_cache_spec
            if not isinstance(group, AttentionSpec) or not isinstance(own, AttentionSpec):
                raise UnsupportedOptionError(
                    f"kv_cache_spec={group} and that of layer {name}, {own}, must be "
                    "AttentionSpecs.",
                    hint="give the builder the spec of the cache that the layers read.",
                )
            if (own.block_size, own.dtype) != (group.block_size, group.dtype):
                raise UnsupportedOptionError(
                    f"kv_cache_spec={group} does not have the block size and dtype of layer "
                    f"{name}: {own}.",
                    hint="layers of one group share one block table and one format.",
                )
        return group.dtype if isinstance(group, AttentionSpec) else self._layer.dtype

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return ALWAYS: grids are bounds, and what they work on is computed on the device."""
        return AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens of a shared prefix, checked and otherwise without effect.
            common: the batch.
            fast_build: without effect: there is one schedule.

        Raises:
            MetadataError: a tensor is missing or elsewhere, or lengths contradict each other.
            UnsupportedOptionError: the batch asks for what the capability does not name.
        """
        self._check(common_prefix_len, common)
        key = (common.num_reqs, common.num_actual_tokens)
        longest, captured = self._captured.get(key, (-1, None))
        if captured is not None and common.max_query_len <= longest:
            metadata = replace(captured, **self._tensors_of(common))
        else:
            metadata = self._new(common, is_bound=False)
        self._fill(metadata, common)
        return metadata

    def build_for_cudagraph_capture(
        self, common: CommonAttentionMetadata
    ) -> TritonAttentionMetadata:
        """Return metadata to capture with: its grids are bounds, its buffers stay.

        Raises:
            UnsupportedOptionError: the batch has multimodal ranges, which are the host's.
        """
        self._check(0, common)
        if any(common.mm_prefix_ranges.values()):
            raise UnsupportedOptionError(
                "a captured batch has no mm_prefix_ranges: a replay could not change them.",
                hint="run such batches without a graph.",
            )
        metadata = self._new(common, is_bound=True)
        self._captured[common.num_reqs, common.num_actual_tokens] = (
            common.max_query_len,
            metadata,
        )
        self._fill(metadata, common)
        return metadata

    def update_block_table(
        self, metadata: TritonAttentionMetadata, block_table: Tensor, slot_mapping: Tensor
    ) -> TritonAttentionMetadata:
        """Return metadata of the same batch over another block table.

        Args:
            metadata: of the batch.
            block_table: (B, M) int32, as wide as the batch's longest request needs.
            slot_mapping: unused: it is handed to `do_kv_cache_update` by the caller.

        Raises:
            UnsupportedOptionError: the layers have no cache.
        """
        if self._is_cache_free:
            raise UnsupportedOptionError("layers without a cache have no block table.")
        self._check_device("block_table", block_table)
        return replace(metadata, block_table=dense_rows(block_table))

    def _check(self, common_prefix_len: int, common: CommonAttentionMetadata) -> None:
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
        for layer in self._distinct.values():
            require_batch_served(self.backend_name, CAPABILITY, layer, common, common_prefix_len)
        self._check_device("query_start_loc", common.query_start_loc)

    def _check_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device.type != self.device.type:
            raise MetadataError.for_argument(
                f"{name} device", tensor.device, f"{self.device}, the builder's"
            )

    def _tensors_of(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        """Return the fields that are tensors of the batch, or say how to read them."""
        causal, flags = 0, None
        if self._layer.attn_type is AttentionType.DECODER:
            causal = int(common.causal) if isinstance(common.causal, bool) else 2
            flags = common.causal.view(torch.uint8) if causal == 2 else None  # type: ignore[union-attr]
        table = None if self._is_cache_free else dense_rows(require_block_table(common))
        return {
            "query_start_loc": common.query_start_loc,
            "key_lens": self._key_lens(common),
            "block_table": table,
            "causal": causal,
            "causal_flags": flags,
        }

    def _key_lens(self, common: CommonAttentionMetadata) -> Tensor:
        if self._is_cache_free:
            starts = common.key_start_loc
            return common.query_start_loc if starts is None else starts
        if self._layer.attn_type is not AttentionType.ENCODER_DECODER:
            return common.seq_lens
        if common.encoder_seq_lens is None:
            raise MetadataError.for_argument(
                "encoder_seq_lens", None, "(num_reqs,) int32, for cross-attention"
            )
        return common.encoder_seq_lens

    def _num_keys(self, common: CommonAttentionMetadata) -> int:
        if not self._is_cache_free:
            return 0
        starts = common.key_start_loc_cpu
        return common.num_actual_tokens if starts is None else int(starts[-1])

    def _new(self, common: CommonAttentionMetadata, *, is_bound: bool) -> TritonAttentionMetadata:
        """Choose grids and take buffers of their size."""
        planner, ranges = self._planner, self._ranges(common.mm_prefix_ranges, common.num_reqs)
        composition = composition_of(
            common,
            group=planner.group,
            rows=planner.prefill.rows,
            # The decode kernel knows no ranges.
            most_tokens=planner.most_tokens if ranges is None else 0,
            is_cache_free=self._is_cache_free,
            is_bound=is_bound,
        )
        decode = None
        if composition.num_decodes and composition.decode_tokens:
            longest = _UNBOUNDED if is_bound else self._longest(common)
            spans = None if is_bound else self._spans(common, composition)
            decode = planner.decode_grid(composition, longest, spans)
        parts, stats = self._room(decode, is_bound)
        return TritonAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_keys=self._num_keys(common),
            num_reqs=common.num_reqs,
            ranges=ranges,
            plans=self._empty_plans(common.num_reqs, decode),
            decode=decode,
            num_blocks=composition.num_blocks,
            prompts=self._prompt_grid(common, composition, decode, ranges, is_bound=is_bound),
            shape=self._shape(decode, composition),
            parts=parts,
            stats=stats,
            num_kv_heads=planner.num_kv_heads,
            side=self._side_of(composition, is_bound=is_bound),
            **self._tensors_of(common),
        )

    def _prompt_grid(
        self,
        common: CommonAttentionMetadata,
        composition: Composition,
        decode: DecodeGrid | None,
        ranges: Tensor | None,
        *,
        is_bound: bool,
    ) -> PromptGrid | None:
        if ranges is not None or not composition.num_blocks:
            return None
        most = 0 if decode is None else self._most(decode)
        return self._prompts.grid(common, most, is_bound=is_bound)

    def _side_of(self, composition: Composition, *, is_bound: bool) -> SideStream | None:
        """Return the stream on which decodes run beside prompts; None where they follow them."""
        machine = self._planner.machine
        if self.device.type not in _HAS_STREAMS or not overlaps(
            machine.arch,
            machine.compute_units,
            has_decodes=composition.num_decodes > 0,
            num_prompt_programs=composition.num_blocks * self._planner.num_kv_heads,
            is_captured=is_bound,
        ):
            return None
        if self._side is None:
            self._side = SideStream(self.device)
        return self._side

    def _spans(self, common: CommonAttentionMetadata, composition: Composition) -> list[int] | None:
        """Return the keys of each decode, of the visibility that sees most; None if not known.

        More requests than a wave holds are not cut, so that nothing depends on their lengths.
        """
        lens, planner = common.seq_lens_cpu, self._planner
        is_known = lens is not None and common.seq_lens_cpu_is_exact and not planner.is_invariant
        is_decoder = self._layer.attn_type is AttentionType.DECODER
        if not is_known or lens is None or not is_decoder or len(self._distinct) > 1:
            return None
        (seen,) = self._distinct
        if seen.chunk or composition.num_decodes > planner.most_slots:
            return None
        most = composition.decode_tokens
        return [
            span if seen.left < 0 else min(span, count + seen.left)
            for span, count in zip(lens.tolist(), query_lens(common), strict=True)
            if 0 < count <= most
        ]

    def _longest(self, common: CommonAttentionMetadata) -> int:
        """Return a bound of the keys of one request."""
        if self._layer.attn_type is not AttentionType.ENCODER_DECODER:
            return common.max_seq_len
        lens = common.encoder_seq_lens_cpu
        return _UNBOUNDED if lens is None or not len(lens) else int(lens.max())

    def _shape(self, decode: DecodeGrid | None, composition: Composition) -> Shape:
        return shape_of(
            None if decode is None else decode.tile,
            0 if decode is None else decode.blocks,
            self._planner.prefill if composition.num_blocks else None,
        )

    def _room(self, decode: DecodeGrid | None, is_bound: bool) -> tuple[Tensor, Tensor]:
        """Return memory for parts: a captured graph's own, or what all other steps share."""
        if decode is None or not decode.may_split:
            return self._nothing, self._nothing
        values, stats = self._planner.part_floats(decode)
        if is_bound:
            room = torch.empty(values + stats, dtype=torch.float32, device=self.device)
        else:
            if len(self._scratch) < values + stats:
                self._scratch = self._scratch.new_empty(values + stats)
            room = self._scratch
        return room[:values], room[values : values + stats]

    def _empty_plans(self, num_reqs: int, decode: DecodeGrid | None) -> dict[Visibility, Tensor]:
        records = 0 if decode is None else decode.max_items
        size = plan_ints(records, num_reqs)
        return {
            visibility: torch.empty(size, dtype=torch.int32, device=self.device)
            for visibility in self._distinct
        }

    def _ranges(self, given: MMPrefixRanges, num_reqs: int) -> Tensor | None:
        """Return the multimodal ranges as (B, R, 2), absent ones empty; None without any."""
        most = max((len(own) for own in given.values()), default=0)
        if not most:
            return None
        table = torch.tensor((0, -1), dtype=torch.int32).repeat(num_reqs, most, 1)
        for request, own in given.items():
            if not 0 <= request < num_reqs:
                raise MetadataError.for_argument(
                    "mm_prefix_ranges", f"keyed by {request}", f"requests below {num_reqs}"
                )
            for index, (start, stop) in enumerate(own):
                if not 0 <= start <= stop:
                    raise MetadataError.for_argument(
                        "mm_prefix_ranges", (start, stop), "0 <= start <= end, both inclusive"
                    )
                table[request, index, 0], table[request, index, 1] = start, stop
        return table.to(self.device)

    def _fill(self, metadata: TritonAttentionMetadata, common: CommonAttentionMetadata) -> None:
        """Have the device compute the work items."""
        if not common.num_reqs:
            return
        decode = metadata.decode
        most_tokens = 0 if decode is None or metadata.ranges is not None else self._most(decode)
        block = next_power_of_2(max(common.num_reqs, self.config.max_num_seqs, 16))
        for visibility, plan in metadata.plans.items():
            launch = planning(
                visibility,
                self._is_cache_free,
                64 if decode is None else decode.tile.keys,
                MAX_PARTS if self._planner.is_invariant else 0,
                self._planner.least_part_tiles,
                block,
            )
            numbers = (
                common.num_reqs,
                metadata.max_items,
                0 if decode is None else decode.slots,
                most_tokens,
                self._planner.group,
                self._planner.prefill.rows,
            )
            launch((1, 1, 1), (plan, metadata.query_start_loc, metadata.key_lens), numbers)
        if metadata.prompts is not None:
            self._prompts.fill(metadata.prompts, metadata.query_start_loc, metadata.key_lens, block)

    def _most(self, decode: DecodeGrid) -> int:
        """Return the query tokens up to which a request of the step decodes."""
        return decode.max_rows // self._planner.group


@functools.cache
def planning(
    visibility: Visibility,
    is_dense: bool,
    tile: int,
    max_parts: int,
    least: int,
    block: int,
) -> AlignedLaunch:
    from attn_triton.kernels.plan import plan_step

    constants = {
        "LEFT": visibility.left,
        "CHUNK": visibility.chunk,
        "DENSE": is_dense,
        "TILE": tile,
        "MAX_PARTS": max_parts,
        "LEAST": least,
        "BLOCK_B": block,
    }
    return AlignedLaunch(Launcher(plan_step, constants, num_warps=4))
