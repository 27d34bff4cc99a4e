"""TRITON_MLA's builder: grids chosen on the host, work items computed on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_shared.alignment import dense_rows
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import MetadataError
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_metadata import MLAMetadata, MLAQuerySupport
from attn_shared.request import MLADims
from attn_shared.served import require_block_table
from attn_shared.spec import BuildConfig, LayerSpec
from attn_triton._builder import planning
from attn_triton._latent_capability import MLA_CAPABILITY, MLA_NAME
from attn_triton._latent_metadata import Merging, TritonMLADecode
from attn_triton._steps import MAX_PARTS, Composition, DecodeGrid, Planner, plan_ints, query_lens
from attn_triton._visibility import visibility_of
from attn_triton.latent_tiles import COMBINE_COLUMNS, COMBINE_ROWS, LatentWidths, latent_tile
from attn_triton.machine import Machine, machine_of
from attn_triton.tiles import COMBINE_PARTS, Tile, next_power_of_2

__all__ = ["LatentPlanner", "TritonMLAMetadataBuilder"]

_UNBOUNDED = 2**31 - 1
_MANY_ROWS = 1024  # of four programs each; 16,384 programs take 10 us to start


class LatentPlanner(Planner):
    """Chooses grids for decodes over latents: all heads are rows of the one kv head."""

    def __init__(
        self, layer: LayerSpec, machine: Machine, *, cache_dtype: torch.dtype, is_invariant: bool
    ) -> None:
        """Keep what does not change from step to step."""
        super().__init__(layer, machine, cache_dtype=cache_dtype, is_invariant=is_invariant)
        dims = layer.mla or MLADims()
        self._latent_widths = LatentWidths(
            latent=dims.kv_lora_rank,
            rope=dims.qk_rope_head_dim,
            element_bytes=layer.dtype.itemsize,
            cache_bytes=cache_dtype.itemsize,
        )

    def _tiles_for(self, max_rows: int) -> tuple[Tile, Tile]:
        """Return one shape for any wave; in batch-invariant mode one for any neighbours too."""
        rows = self.group if self.is_invariant else max_rows
        tile = latent_tile(self.machine.arch, self._latent_widths, rows)
        return tile, tile

    def merging(self, grid: DecodeGrid, num_reqs: int) -> Merging:
        """Return how parts are merged.

        Many rows by blocks, since so many programs take long to start; few by their columns, about
        as many parts at once as a request has. In batch-invariant mode always by blocks, where the
        order of sums depends on a row's own parts alone.
        """
        rows = num_reqs * grid.max_rows
        if self.is_invariant or rows > _MANY_ROWS:
            programs = num_reqs * -(-grid.max_rows // COMBINE_ROWS)
            return Merging(programs=programs, parts_at_once=0)
        columns = -(-self._latent_widths.padded[0] // COMBINE_COLUMNS)
        mean = grid.slots // max(1, num_reqs)
        at_once = min(COMBINE_PARTS, next_power_of_2(max(2, mean)))
        return Merging(programs=rows * columns, parts_at_once=at_once)


class TritonMLAMetadataBuilder(MLAMetadataBuilder[TritonMLADecode]):
    """Plans decodes of any query lengths; nothing is waited for, and no host length is needed.

    A step that was built for capture keeps its buffers: a later `build` of as many requests and
    tokens, whose queries are no longer, computes its plan into them, so that the captured graph
    replays with the new lengths.
    """

    backend_name = MLA_NAME
    served = MLA_CAPABILITY
    query_support = MLAQuerySupport.VARLEN
    # Drafts of speculative decoding; longer rows multiply less with expanded heads.
    decode_threshold = 8

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
        cache = self.layer.kv_cache_spec
        self._planner = LatentPlanner(
            self.layer,
            machine_of(device),
            cache_dtype=getattr(cache, "dtype", self.layer.dtype),
            is_invariant=self.is_invariant,
        )
        self._captured: dict[tuple[int, int], tuple[int, TritonMLADecode]] = {}
        self._is_capturing = False
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return UNIFORM_BATCH: decodes are captured, prefills depend on their lengths."""
        return AttentionCGSupport.UNIFORM_BATCH

    def build_for_cudagraph_capture(
        self, common: CommonAttentionMetadata
    ) -> MLAMetadata[TritonMLADecode]:
        """Return metadata to capture with: its grids are bounds, its buffers stay.

        Raises:
            UnsupportedOptionError: the batch has prefills.
        """
        self._is_capturing = True
        try:
            return super().build_for_cudagraph_capture(common)
        finally:
            self._is_capturing = False

    def build_decode(self, common: CommonAttentionMetadata) -> TritonMLADecode:
        """Return how the decodes run.

        Raises:
            MetadataError: a tensor is missing or elsewhere.
        """
        starts, lens = common.query_start_loc, common.seq_lens
        if starts.device.type != self.device.type:
            raise MetadataError.for_argument(
                "query_start_loc device", starts.device, f"{self.device}, the builder's"
            )
        table = dense_rows(require_block_table(common))
        key = (common.num_reqs, common.num_actual_tokens)
        longest, captured = self._captured.get(key, (-1, None))
        if captured is not None and common.max_query_len <= longest and not self._is_capturing:
            grid, memory = captured.grid, (captured.plan, captured.parts, captured.stats)
        else:
            grid = self._grid(common)
            memory = self._memory(grid, common.num_reqs)
        found = TritonMLADecode.of(
            grid,
            memory,
            starts,
            lens,
            table,
            causal=common.causal is not False,
            merging=self._planner.merging(grid, common.num_reqs),
        )
        if self._is_capturing:
            self._captured[key] = (common.max_query_len, found)
        self._fill(found, common)
        return found

    def _grid(self, common: CommonAttentionMetadata) -> DecodeGrid:
        composition = Composition(
            num_decodes=common.num_reqs, decode_tokens=common.max_query_len, num_blocks=0
        )
        if self._is_capturing:
            return self._planner.decode_grid(composition, _UNBOUNDED, None)
        return self._planner.decode_grid(composition, common.max_seq_len, self._spans(common))

    def _spans(self, common: CommonAttentionMetadata) -> list[int] | None:
        """Return the keys of each request, where the host knows them and they decide anything."""
        lens, planner = common.seq_lens_cpu, self._planner
        if lens is None or not common.seq_lens_cpu_is_exact or planner.is_invariant:
            return None
        if common.num_reqs > planner.most_slots:
            return None
        spans: list[int] = lens.tolist()
        counts = query_lens(common)
        return [span for span, count in zip(spans, counts, strict=True) if count]

    def _memory(self, grid: DecodeGrid, num_reqs: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a plan and memory for parts: a captured graph's own, or what other steps share."""
        size = plan_ints(grid.max_items, num_reqs)
        plan = torch.empty(size, dtype=torch.int32, device=self.device)
        values, stats = self._planner.part_floats(grid)
        if self._is_capturing:
            room = self._scratch.new_empty(values + stats)
        else:
            if len(self._scratch) < values + stats:
                self._scratch = self._scratch.new_empty(values + stats)
            room = self._scratch
        return plan, room[:values], room[values : values + stats]

    def _fill(self, found: TritonMLADecode, common: CommonAttentionMetadata) -> None:
        """Have the device compute the work items."""
        grid, planner = found.grid, self._planner
        launch = planning(
            visibility_of(self.layer),
            False,
            grid.tile.keys,
            MAX_PARTS if planner.is_invariant else 0,
            planner.least_part_tiles,
            next_power_of_2(max(common.num_reqs, self.config.max_num_seqs, 16)),
        )
        most_tokens = grid.max_rows // planner.group
        numbers = (common.num_reqs, grid.max_items, grid.slots, most_tokens, planner.group, 1)
        launch((1, 1, 1), (found.plan, common.query_start_loc, common.seq_lens), numbers)
