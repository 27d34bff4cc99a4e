"""FLASHINFER's step: decodes first, the rest behind them, each by a wrapper planned on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from attn_cuda import _fi_loaded
from attn_cuda._fi_capability import NAME, capability_on
from attn_cuda._fi_key import PlanKey, group_key
from attn_cuda._fi_pages import Pages, page_indices, pages_of, require_pages
from attn_cuda._fi_parts import CascadePart, FreshPart, Part, PlannedPart
from attn_cuda._fi_wrappers import Lease, Wrappers
from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.capability import Capability
from attn_shared.cascade import use_cascade
from attn_shared.checked import check_metadata
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.served import require_batch_served, require_block_table
from attn_shared.spec import BuildConfig, LayerSpec
from attn_triton.portable import portable_for

__all__ = ["FlashInferMetadata", "FlashInferMetadataBuilder", "Rows", "cut", "keyless_rows"]

_FEW_ROWS = 16
"""Up to here a request's rows are bound by memory, and the kernels "fa2", which split keys, serve
them best."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferMetadata:
    """One step, as the layers of a group read it.

    Attributes:
        backend: whose it is.
        key: what the plans have fixed.
        device: where the batch is.
        num_actual_tokens: query rows that belong to requests.
        parts: who serves which rows.
    """

    backend: str
    key: PlanKey
    device: torch.device
    num_actual_tokens: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Requests in a row, as the host knows them.

    Attributes:
        query_start_loc: (B + 1,) int32 on the host, from 0.
        seq_lens: (B,) int32 on the host.
        block_table: (B, M) int32 on the device.
        device_lens: (B,) int32 on the device, as `seq_lens`.
        first: the step's row where they begin.
        num_tokens: rows.
        max_query_len: of the longest.
        causal: bottom-right aligned.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    device_lens: Tensor
    first: int
    num_tokens: int
    max_query_len: int
    causal: bool

    @property
    def last(self) -> int:
        """The step's row behind them."""
        return self.first + self.num_tokens


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Plans a batch; leading requests with one row are decodes, wherever others stand.

    Rows behind the first longer one are served by the prefill wrapper, whatever their length, so
    that every order is right and a batch with its decodes first is fast. With `capture_sizes`
    batches of single queries have one wrapper for each size, whose buffers stay.
    """

    backend_name: ClassVar[str] = NAME

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs; plan nothing.

        Raises:
            UnsupportedOptionError: layers differ in what one plan must share, or results must not
                depend on what shares the batch.
            VendorMissingError: nothing is loaded.
        """
        super().__init__(kv_cache_spec, layers, config, device)
        if config.batch_invariant:
            raise UnsupportedOptionError(
                f"batch_invariant=True is not served by {self.backend_name}; allowed: False, for "
                "its tiles and splits follow the whole batch.",
                hint="select with batch_invariant=True.",
            )
        self._key = group_key(layers)
        self._loaded = _fi_loaded.loaded(self.backend_name)
        self._capability = self._capability_of(self._loaded)
        self._block_size = self.shared_block_size()
        self._portable = portable_for(self._loaded.device)
        self._distinct = tuple({layer.has_sinks: layer for layer in layers.values()}.values())
        self._sizes = frozenset(config.capture_sizes)
        self._wrappers = Wrappers(
            self._key, device, self._loaded, config.workspace, max(self._sizes, default=0)
        )
        self._most_pages = -(-config.max_model_len // self._block_size)
        self.reorder_batch_threshold = 1

    @staticmethod
    def _capability_of(loaded: _fi_loaded.Loaded) -> Capability:
        return capability_on(loaded.device, loaded.inventory)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return UNIFORM_SINGLE_TOKEN_DECODE: the decode wrapper's grid is that of a batch size."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Sequence[int], num_compute_units: int
    ) -> bool:
        """Whether running the shared prefix once is expected to pay."""
        key, layer = self._key, self._distinct[0]
        return use_cascade(
            common_prefix_len=common_prefix_len,
            query_lens=query_lens,
            num_heads=key.num_heads,
            num_kv_heads=key.num_kv_heads,
            num_compute_units=num_compute_units,
            has_window=key.window_left >= 0,
            dcp_size=layer.dcp_size,
        )

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens of a shared prefix, attended once.
            common: the batch; its lengths must be exact on the host.
            fast_build: changes nothing: there is no cheaper plan.

        Raises:
            MetadataError: lengths contradict each other or the block table, or the prefix is none.
            UnsupportedOptionError: the batch asks for what the capability does not name.
        """
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
        for layer in self._distinct:
            require_batch_served(
                self.backend_name, self._capability, layer, common, common_prefix_len
            )
        rows = self._rows(common)
        if common_prefix_len:
            parts: tuple[Part, ...] = (self._cascade(common_prefix_len, rows),)
        else:
            parts = tuple(self._parts(rows))
        return FlashInferMetadata(
            backend=self.backend_name,
            key=self._key,
            device=common.query_start_loc.device,
            num_actual_tokens=common.num_actual_tokens,
            parts=parts,
        )

    def _rows(self, common: CommonAttentionMetadata) -> Rows:
        table, lens = require_block_table(common), common.exact_seq_lens_cpu
        if table.device.type != self.device.type:
            raise MetadataError.for_argument(
                "the batch's device", table.device, f"{self.device}, the builder's"
            )
        require_pages(lens, table, self._block_size)
        return Rows(
            query_start_loc=common.query_start_loc_cpu,
            seq_lens=lens,
            block_table=table,
            device_lens=common.seq_lens,
            first=0,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            causal=common.causal is True,
        )

    def _parts(self, rows: Rows) -> list[Part]:
        """Cut a batch into its leading decodes and the rest; requests without rows need no part."""
        decodes, rest = self._split(rows)
        parts: list[Part] = []
        if decodes is not None:
            parts.append(self._decode(decodes))
        if rest is not None:
            parts.append(self._prefill(rest))
        return parts

    def _split(self, rows: Rows) -> tuple[Rows | None, Rows | None]:
        if not rows.num_tokens:
            return None, None
        if not rows.causal:
            return None, rows
        count = num_single_rows(rows)
        head = cut(rows, 0, count) if count else None
        return head, (cut(rows, count, None) if count < rows.num_tokens else None)

    def _decode(self, rows: Rows) -> Part:
        pages = pages_of(rows.seq_lens, self._block_size)
        lease = self._decode_lease(len(rows.seq_lens), pages)
        lease.planner.plan(
            indptr=pages.starts,
            indices=page_indices(rows.block_table, pages),
            last_page_len=pages.last_lens,
            seq_lens=pages.seq_lens,
            head_dim=self._key.head_size,
            page_size=self._block_size,
            **self._key.options(),
        )
        return PlannedPart(lease=lease, first=rows.first, last=rows.last)

    def _decode_lease(self, size: int, pages: Pages) -> Lease:
        if size not in self._sizes:
            return self._wrappers.decode()
        lease = self._wrappers.captured(size, self._most_pages)
        if pages.count > self._wrappers.held_pages:
            raise MetadataError.for_argument(
                "pages of a captured batch",
                pages.count,
                f"at most {self._wrappers.held_pages}: {max(self._sizes)} requests of "
                f"max_model_len={self.config.max_model_len}",
            )
        return lease

    def _prefill(self, rows: Rows) -> Part:
        paged = partial(self._paged, rows)
        kernels = self._kernels(rows)
        if kernels != "fa3" or not self._is_fresh(rows):
            return paged()
        lease = self._wrappers.ragged(kernels)
        lease.planner.plan(
            qo_indptr=rows.query_start_loc,
            kv_indptr=rows.query_start_loc,
            head_dim_qk=self._key.head_size,
            causal=True,
            **self._key.options(),
        )
        return FreshPart(lease=lease, first=rows.first, last=rows.last, paged=cache(paged))

    def _is_fresh(self, rows: Rows) -> bool:
        """Whether the step brings every key; a rank's share of a sequence is no such batch."""
        if not rows.causal or self._distinct[0].dcp_size > 1:
            return False
        return bool((rows.seq_lens == rows.query_start_loc.diff()).all())

    def _kernels(self, rows: Rows) -> str:
        """Return the family of kernels: Hopper's own where rows are many and the cache is plain.

        A window over rows without a causal mask is left to the older family, whose mask is written
        out by position.
        """
        is_plain = not self._key.is_quantized and (rows.causal or self._key.window_left < 0)
        is_many = rows.num_tokens > _FEW_ROWS * len(rows.seq_lens)
        return "fa3" if self._loaded.major == 9 and is_plain and is_many else "fa2"

    def _paged(self, rows: Rows) -> PlannedPart:
        pages = pages_of(rows.seq_lens, self._block_size)
        lease = self._wrappers.prefill(self._kernels(rows))
        lease.planner.plan(
            qo_indptr=rows.query_start_loc,
            paged_kv_indptr=pages.starts,
            paged_kv_indices=page_indices(rows.block_table, pages),
            paged_kv_last_page_len=pages.last_lens,
            seq_lens=pages.seq_lens,
            head_dim_qk=self._key.head_size,
            page_size=self._block_size,
            causal=rows.causal,
            **self._key.options(),
        )
        return PlannedPart(
            lease=lease, first=rows.first, last=rows.last, keyless=keyless_rows(rows)
        )

    def _cascade(self, length: int, rows: Rows) -> Part:
        """Cut a batch into the prefix, one request of all rows, and what follows it."""
        if self._key.window_left >= 0:
            raise UnsupportedOptionError(
                f"common_prefix_len={length} with a window of {self._key.window_left + 1}; "
                "allowed: 0.",
                hint="ask use_cascade_attention first.",
            )
        blocks = length // self._block_size
        prefix = Rows(
            query_start_loc=torch.tensor([0, rows.num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            block_table=rows.block_table[:1, :blocks],
            device_lens=rows.device_lens[:1],
            first=0,
            num_tokens=rows.num_tokens,
            max_query_len=rows.num_tokens,
            causal=False,
        )
        suffix = Rows(
            query_start_loc=rows.query_start_loc,
            seq_lens=rows.seq_lens - length,
            block_table=rows.block_table[:, blocks:],
            device_lens=rows.device_lens,
            first=0,
            num_tokens=rows.num_tokens,
            max_query_len=rows.max_query_len,
            causal=True,
        )
        return CascadePart(
            lease=self._planned_levels(prefix, suffix),
            num_tokens=rows.num_tokens,
            apart=cache(lambda: (self._paged(prefix), self._paged(suffix))),
            merge=self._portable.merge,
        )

    def _planned_levels(self, prefix: Rows, suffix: Rows) -> Lease:
        levels = (prefix, suffix)
        pages = [pages_of(rows.seq_lens, self._block_size) for rows in levels]
        lease = self._wrappers.cascade()
        lease.planner.plan(
            qo_indptr_arr=[rows.query_start_loc for rows in levels],
            paged_kv_indptr_arr=[found.starts for found in pages],
            paged_kv_indices_arr=[
                page_indices(rows.block_table, found)
                for rows, found in zip(levels, pages, strict=True)
            ],
            paged_kv_last_page_len=[found.last_lens for found in pages],
            head_dim=self._key.head_size,
            page_size=self._block_size,
            causal=True,
            **self._key.options(),
        )
        return lease


def num_single_rows(rows: Rows) -> int:
    """Return how many leading requests have one row each."""
    if rows.max_query_len == 1 and rows.num_tokens == len(rows.seq_lens):
        return rows.num_tokens
    return int((rows.query_start_loc.diff() == 1).long().cumprod(0).sum())


def cut(rows: Rows, start: int, stop: int | None) -> Rows:
    """Return some of the requests."""
    if start == 0 and stop == len(rows.seq_lens):
        return rows
    starts = rows.query_start_loc[start : None if stop is None else stop + 1]
    first, last = int(starts[0]), int(starts[-1])
    lens = starts.diff()
    return Rows(
        query_start_loc=starts - first if first else starts,
        seq_lens=rows.seq_lens[start:stop],
        block_table=rows.block_table[start:stop],
        device_lens=rows.device_lens[start:stop],
        first=rows.first + first,
        num_tokens=last - first,
        max_query_len=int(lens.max()) if len(lens) else 0,
        causal=rows.causal,
    )


def keyless_rows(rows: Rows) -> Tensor | None:
    """Return (n,) int64 on the device: rows, from the part's first, that see no key."""
    query_lens = rows.query_start_loc.diff()
    if rows.causal:
        missing = (query_lens - rows.seq_lens).clamp_(min=0)
    else:
        missing = torch.where(rows.seq_lens == 0, query_lens, 0)
    if not bool(missing.any()):
        return None
    places = [
        torch.arange(start, start + count)
        for start, count in zip(rows.query_start_loc.tolist(), missing.tolist(), strict=False)
    ]
    return torch.cat(places).to(rows.block_table.device, non_blocking=True)
