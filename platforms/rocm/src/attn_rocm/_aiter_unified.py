"""ROCM_AITER_UNIFIED_ATTN's step and builder: one call for decodes and prompts alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_rocm._aiter_build import AiterBuild
from attn_rocm._aiter_capability import UNIFIED, unified_capability
from attn_rocm._aiter_loaded import loaded
from attn_shared.alignment import dense_rows
from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.checked import check_metadata
from attn_shared.errors import MetadataError
from attn_shared.keyless import Keyless, keyless_of
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.served import require_batch_served, require_block_table
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_shared.step_buffers import Buffers

__all__ = ["AiterUnifiedMetadata", "AiterUnifiedMetadataBuilder"]

_SHARED = ("attn_type", "num_heads", "num_kv_heads", "head_size", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AiterUnifiedMetadata:
    """One step.

    Attributes:
        build: the release that it was made for.
        num_actual_tokens: query rows that belong to requests.
        query_start_loc: (B + 1,) int32.
        max_query_len: host bound.
        key_lens: (B,) int32.
        max_key_len: host bound.
        block_table: (B, M) int32, dense in its rows.
        keyless: the requests without keys, which have one of block 0 here and whose rows are to be
            set; None where there are none.
    """

    build: AiterBuild
    num_actual_tokens: int
    query_start_loc: Tensor
    max_query_len: int
    key_lens: Tensor
    max_key_len: int
    block_table: Tensor
    keyless: Keyless | None = None


class AiterUnifiedMetadataBuilder(AttentionMetadataBuilder[AiterUnifiedMetadata]):
    """Describes a batch; host lengths may be upper bounds or missing, any order is fine.

    By the bounds the call chooses its kernels, and whether each request has one row, so that a
    batch of a captured size is bounded as it was captured.
    """

    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs.

        Raises:
            UnsupportedOptionError: layers differ in what one plan must share.
            VendorMissingError: AITER is not loaded.
        """
        super().__init__(kv_cache_spec, layers, config, device)
        require_uniform(layers, _SHARED)
        self.shared_block_size()
        entry = loaded(UNIFIED)
        self._build = entry.build
        self._capability = unified_capability(entry.device, entry.inventory)
        self._kept = Buffers(device, is_kept=True)
        # (requests, tokens, of single queries) -> bounds of queries and keys that were captured.
        self._bounds: dict[tuple[int, int, bool], tuple[int, int]] = {}

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return ALWAYS: grids follow from numbers of rows and requests, the rest is read there."""
        return AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> AiterUnifiedMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens of a shared prefix, checked and otherwise without effect.
            common: the batch.
            fast_build: without effect.

        Raises:
            MetadataError: a tensor is missing or elsewhere, or lengths contradict each other.
            UnsupportedOptionError: the batch asks for what the capability does not name.
        """
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
        for layer in self.layers.values():
            require_batch_served(UNIFIED, self._capability, layer, common, common_prefix_len)
        if common.query_start_loc.device.type != self.device.type:
            raise MetadataError.for_argument(
                "the batch's device", common.query_start_loc.device, f"{self.device}, the builder's"
            )
        max_query_len, max_key_len = self._captured_bounds(common)
        metadata = AiterUnifiedMetadata(
            build=self._build,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            max_query_len=max_query_len,
            key_lens=common.seq_lens,
            max_key_len=max_key_len,
            block_table=dense_rows(require_block_table(common)),
        )
        if self._has_keys(common) or not common.num_actual_tokens:
            return metadata
        return self._with_keys(metadata, common)

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> AiterUnifiedMetadata:
        """Return metadata to capture with; `build` bounds later batches of this size alike."""
        self._bounds[_size_of(common)] = _bounds_of(common)
        return self.build(0, common)

    def update_block_table(
        self, metadata: AiterUnifiedMetadata, block_table: Tensor, slot_mapping: Tensor
    ) -> AiterUnifiedMetadata:
        """Return metadata of the same batch over another block table.

        Args:
            metadata: of the batch.
            block_table: (B, M) int32, as wide as the batch's longest request needs.
            slot_mapping: unused: it is handed to `do_kv_cache_update` by the caller.
        """
        if metadata.keyless is not None:
            block_table = metadata.keyless.table(block_table)
        return replace(metadata, block_table=dense_rows(block_table))

    def _with_keys(
        self, metadata: AiterUnifiedMetadata, common: CommonAttentionMetadata
    ) -> AiterUnifiedMetadata:
        """Give requests without keys one: the merge of their parts divides by their length."""
        is_captured = _size_of(common) in self._bounds
        buffers = self._kept if is_captured else Buffers(self.device, is_kept=False)
        keyless = keyless_of(
            common.query_start_loc,
            common.seq_lens,
            num_tokens=common.num_actual_tokens,
            num_columns=1,
            buffers=buffers,
        )
        return replace(
            metadata,
            key_lens=buffers.kept("key_lens", common.seq_lens.clamp(min=1)),
            block_table=keyless.table(metadata.block_table),
            keyless=keyless,
        )

    def _has_keys(self, common: CommonAttentionMetadata) -> bool:
        """Whether the host knows that every request has keys; a captured batch is never sure."""
        if _size_of(common) in self._bounds:
            return False
        host = common.seq_lens_cpu if common.seq_lens_cpu_is_exact else None
        return host is not None and bool((host > 0).all())

    def _captured_bounds(self, common: CommonAttentionMetadata) -> tuple[int, int]:
        """Return the bounds that a batch of this size was captured with, if it is within them."""
        own = _bounds_of(common)
        captured = self._bounds.get(_size_of(common), (0, 0))
        return captured if own[0] <= captured[0] and own[1] <= captured[1] else own


def _size_of(common: CommonAttentionMetadata) -> tuple[int, int, bool]:
    return (common.num_reqs, common.num_actual_tokens, _is_single(common))


def _bounds_of(common: CommonAttentionMetadata) -> tuple[int, int]:
    """Return bounds of queries and keys; 1 stands for "each request has one row, its own"."""
    return (1 if _is_single(common) else max(2, common.max_query_len)), max(1, common.max_seq_len)


def _is_single(common: CommonAttentionMetadata) -> bool:
    return common.max_query_len <= 1 and common.num_actual_tokens == common.num_reqs
