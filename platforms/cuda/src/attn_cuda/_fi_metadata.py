"""FLASHINFER's step: decodes first, the rest behind them, each by a wrapper planned on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from attn_cuda import _fi_loaded
from attn_cuda._fi_capability import NAME, capability_on
from attn_cuda._fi_choice import FEW_ROWS, has_hoppers_kernels
from attn_cuda._fi_key import PlanKey, group_key
from attn_cuda._fi_pages import Pages, page_indices, pages_of, require_pages
from attn_cuda._fi_parts import CascadePart, FreshPart, Once, Part, PlannedPart
from attn_cuda._fi_rows import Rows, cut, keyless_rows, num_single_rows
from attn_cuda._fi_wrappers import Lease, Wrappers, has_plain_decode, uses_tensor_cores
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

__all__ = ["FlashInferMetadata", "FlashInferMetadataBuilder"]


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
        self._options = self._key.options()
        self._distinct = tuple({layer.has_sinks: layer for layer in layers.values()}.values())
        self._combines_ranks = self._distinct[0].dcp_size > 1  # each call is asked for its LSE
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

    def _page_indices(self, rows: Rows, pages: Pages) -> Tensor:
        return page_indices(rows.block_table, pages, self._portable.page_indices)

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
        size = len(rows.seq_lens)
        pages = pages_of(rows.seq_lens, self._block_size)
        on_tensor_cores = uses_tensor_cores(self._key) and not self._combines_ranks
        if size in self._sizes:
            lease = self._captured_lease(size, pages)
        else:
            lease = self._wrappers.decode(on_tensor_cores=on_tensor_cores)
        has_lse = not on_tensor_cores and size not in self._sizes
        with_lse = None if has_lse else Once(partial(self._decode_with_lse, rows, pages))
        return self._planned_decode(rows, pages, lease, with_lse)

    def _planned_decode(
        self,
        rows: Rows,
        pages: Pages,
        lease: Lease,
        with_lse: Callable[[], PlannedPart] | None = None,
    ) -> PlannedPart:
        lease.planner.plan(
            indptr=pages.starts,
            indices=self._page_indices(rows, pages),
            last_page_len=pages.last_lens,
            seq_lens=pages.seq_lens,
            head_dim=self._key.head_size,
            page_size=self._block_size,
            **self._options,
        )
        return PlannedPart(
            lease=lease,
            first=rows.first,
            last=rows.last,
            keyless=None if with_lse is not None else keyless_rows(rows),
            with_lse=with_lse,
        )

    def _decode_with_lse(self, rows: Rows, pages: Pages) -> PlannedPart:
        """Plan the decode whose LSE is right: that without tensor cores, and outside graphs."""
        self._require_lse(rows)
        return self._planned_decode(rows, pages, self._wrappers.decode(on_tensor_cores=False))

    def _require_lse(self, rows: Rows) -> None:
        """Refuse an LSE of kernels that have none, and one that a graph would hold.

        Raises:
            UnsupportedOptionError: as said.
        """
        name = self.backend_name
        if rows.block_table.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedOptionError(
                f"lse is given while a graph is captured; {name} plans it for each step anew.",
                hint="call it outside of graphs, or select another backend with needs_lse=True.",
            )
        if self._loaded.major != 9 or not has_plain_decode(self._key):
            raise UnsupportedOptionError(
                f"lse is given, and {name} has none of {self._key.num_heads} heads over "
                f"{self._key.num_kv_heads} in a cache of {self._key.kv_dtype} on "
                f"{self._loaded.device.arch}.",
                hint="select with needs_lse=True, which says why.",
            )

    def _captured_lease(self, size: int, pages: Pages) -> Lease:
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
            **self._options,
        )
        return FreshPart(lease=lease, first=rows.first, last=rows.last, paged=Once(paged))

    def _is_fresh(self, rows: Rows) -> bool:
        """Whether the step brings every key; a rank's share of a sequence is no such batch."""
        if not rows.causal or self._combines_ranks:
            return False
        return torch.equal(rows.seq_lens, rows.query_start_loc.diff())

    def _kernels(self, rows: Rows) -> str:
        """Return the family of kernels: Hopper's own where rows are many and the cache is plain.

        They are taken for few rows as well where every call is asked for its LSE.
        """
        is_many = self._combines_ranks or rows.num_tokens > FEW_ROWS * len(rows.seq_lens)
        has_own = has_hoppers_kernels(self._loaded.major, is_quantized=self._key.is_quantized)
        return "fa3" if has_own and is_many else "fa2"

    def _paged(self, rows: Rows, kernels: str = "") -> PlannedPart:
        kernels = kernels or self._kernels(rows)
        pages = pages_of(rows.seq_lens, self._block_size)
        lease = self._wrappers.prefill(kernels)
        lease.planner.plan(
            qo_indptr=rows.query_start_loc,
            paged_kv_indptr=pages.starts,
            paged_kv_indices=self._page_indices(rows, pages),
            paged_kv_last_page_len=pages.last_lens,
            seq_lens=pages.seq_lens,
            head_dim_qk=self._key.head_size,
            page_size=self._block_size,
            causal=rows.causal,
            **self._options,
        )
        return PlannedPart(
            lease=lease,
            first=rows.first,
            last=rows.last,
            keyless=keyless_rows(rows),
            with_lse=None if kernels == "fa3" else Once(partial(self._paged_with_lse, rows)),
        )

    def _paged_with_lse(self, rows: Rows) -> PlannedPart:
        """Plan the prefill whose LSE is right: Hopper's own."""
        self._require_lse(rows)
        return self._paged(rows, "fa3")

    def _cascade(self, length: int, rows: Rows) -> Part:
        """Return the step over a prefix that all requests share."""
        prefix, suffix = self._levels(length, rows)
        return CascadePart(
            lease=self._planned_levels(prefix, suffix),
            num_tokens=rows.num_tokens,
            apart=cache(partial(self._levels_apart, prefix, suffix)),
            merge=self._portable.merge,
        )

    def _levels(self, length: int, rows: Rows) -> tuple[Rows, Rows]:
        """Cut a batch into the prefix, one request of all rows, and what follows it.

        Raises:
            UnsupportedOptionError: keys of the prefix may be hidden by a window.
        """
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
        return prefix, suffix

    def _levels_apart(
        self, prefix: Rows, suffix: Rows, has_lse: bool
    ) -> tuple[PlannedPart, PlannedPart]:
        """Return both levels as parts; to merge outputs alone a rounded LSE is enough."""
        if has_lse:
            return self._paged_with_lse(prefix), self._paged_with_lse(suffix)
        first, second = self._paged(prefix), self._paged(suffix)
        return replace(first, with_lse=None), replace(second, with_lse=None)

    def _planned_levels(self, prefix: Rows, suffix: Rows) -> Lease:
        levels = (prefix, suffix)
        pages = [pages_of(rows.seq_lens, self._block_size) for rows in levels]
        lease = self._wrappers.cascade()
        lease.planner.plan(
            qo_indptr_arr=[rows.query_start_loc for rows in levels],
            paged_kv_indptr_arr=[found.starts for found in pages],
            paged_kv_indices_arr=[
                self._page_indices(rows, found) for rows, found in zip(levels, pages, strict=True)
            ],
            paged_kv_last_page_len=[found.last_lens for found in pages],
            head_dim=self._key.head_size,
            page_size=self._block_size,
            causal=True,
            **self._options,
        )
        return lease
