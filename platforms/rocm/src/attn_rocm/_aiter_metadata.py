"""ROCM_AITER_FA's builder: single queries apart from prompts, without a look at the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attn_rocm._aiter_build import AiterBuild
from attn_rocm._aiter_calls import PAGE_SIZE, workspace_bytes
from attn_rocm._aiter_capability import (
    FLASH,
    MOST_QUERIES_PER_KV,
    PAGED_HEAD_SIZE,
    decodes_by_pages,
    flash_capability,
)
from attn_rocm._aiter_loaded import loaded
from attn_rocm._aiter_steps import AiterFlashMetadata, DecodeStep, PromptStep
from attn_shared.alignment import dense_rows
from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.batching import split_decodes_and_prefills
from attn_shared.checked import check_metadata
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.keyless import keyless_of
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType
from attn_shared.served import request_of, require_batch_served, require_block_table
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_shared.step_buffers import Buffers

__all__ = ["CACHE_FREE", "AiterFlashMetadataBuilder"]

CACHE_FREE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

_SHARED = ("attn_type", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype")
_LEAST_BOUND = 2


class AiterFlashMetadataBuilder(AttentionMetadataBuilder[AiterFlashMetadata]):
    """Splits a batch into its leading single queries and the rest; any order is fine.

    Host lengths may be upper bounds or missing. With `capture_sizes` what is made for a batch of a
    captured size stays at one address, and later batches of the size are bounded as it was.
    """

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
        self._layer = require_uniform(layers, _SHARED)
        entry = loaded(FLASH)
        self._build: AiterBuild = entry.build
        self._capability = flash_capability(entry.device, entry.inventory)
        self._is_cached = self._layer.attn_type not in CACHE_FREE
        self._block_size = self.shared_block_size() if self._is_cached else 0
        self._by_pages = [decodes_by_pages(request_of(layer)) for layer in layers.values()]
        self._kept = Buffers(device, is_kept=True)
        # (requests, tokens) -> bound of the keys that was captured.
        self._bounds: dict[tuple[int, int], int] = {}

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return UNIFORM_SINGLE_TOKEN_DECODE: prompts take what the host knows of a batch."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> AiterFlashMetadata:
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
            require_batch_served(FLASH, self._capability, layer, common, common_prefix_len)
        if common.query_start_loc.device.type != self.device.type:
            raise MetadataError.for_argument(
                "the batch's device", common.query_start_loc.device, f"{self.device}, the builder's"
            )
        if not self._is_cached:
            return self._ragged(common)
        return self._paged(common)

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> AiterFlashMetadata:
        """Return metadata to capture with; `build` bounds later batches of this size alike.

        Raises:
            UnsupportedOptionError: a layer's decodes take what this release's call wants of the
                host.
        """
        if not all(self._by_pages) and not self._reads_table():
            raise UnsupportedOptionError(
                f"{FLASH} with {self._build} captures no layer with a window, sinks or more than "
                f"{MOST_QUERIES_PER_KV} query heads per kv head over blocks of {self._block_size}: "
                "its prefill takes the place of each token.",
                hint=f"run such layers without a graph, or with an AITER whose prefill takes a "
                f"block table, blocks of {PAGE_SIZE}, and heads of at most {PAGED_HEAD_SIZE}.",
            )
        self._bounds[_size_of(common)] = max(_LEAST_BOUND, self._key_lens(common)[1])
        return self.build(0, common)

    def _reads_table(self) -> bool:
        """Whether the paged prefill takes this cache by its block table."""
        is_small = self._layer.head_size <= PAGED_HEAD_SIZE
        return self._build.reads_tables and self._block_size == PAGE_SIZE and is_small

    def _ragged(self, common: CommonAttentionMetadata) -> AiterFlashMetadata:
        """Describe a batch that brings its keys."""
        starts, host = common.query_start_loc, common.query_start_loc_cpu
        if common.key_start_loc is not None and common.key_start_loc_cpu is not None:
            starts, host = common.key_start_loc, common.key_start_loc_cpu
        lens = host.diff()
        step = PromptStep(
            query_start_loc=common.query_start_loc,
            max_query_len=max(_LEAST_BOUND, common.max_query_len),
            max_key_len=max(_LEAST_BOUND, int(lens.max()) if len(lens) else 0),
            causal=False,
            num_keys=int(host[-1]),
            key_start_loc=starts,
        )
        if len(lens) and int(lens.min()) == 0:
            step = self._with_keyless(step, common, starts.diff())
        return AiterFlashMetadata(
            build=self._build,
            num_actual_tokens=common.num_actual_tokens,
            num_keys=step.num_keys,
            query_start_loc=common.query_start_loc,
            whole=step,
        )

    def _paged(self, common: CommonAttentionMetadata) -> AiterFlashMetadata:
        lens, longest = self._key_lens(common)
        longest = self._captured_bound(common, max(_LEAST_BOUND, longest))
        host = self._host_lens(common)
        is_decoder = self._layer.attn_type is AttentionType.DECODER
        whole = PromptStep(
            query_start_loc=common.query_start_loc,
            max_query_len=max(_LEAST_BOUND, common.max_query_len),
            max_key_len=longest,
            causal=common.causal is True and is_decoder,
            num_keys=_num_keys(host, common.num_reqs, longest),
            key_lens=lens,
            block_table=dense_rows(require_block_table(common)),
        )
        if not self._has_keys(common) and common.num_actual_tokens:
            whole = self._with_keyless(whole, common, lens)
        metadata = AiterFlashMetadata(
            build=self._build,
            num_actual_tokens=common.num_actual_tokens,
            num_keys=0,
            query_start_loc=common.query_start_loc,
            whole=whole,
        )
        return self._split(metadata, common, host)

    def _split(
        self, metadata: AiterFlashMetadata, common: CommonAttentionMetadata, host: Tensor | None
    ) -> AiterFlashMetadata:
        """Take the leading single queries out, for layers that run them by pages."""
        brings_keys = self._brings_keys(common, 0)
        metadata = replace(metadata, whole=replace(metadata.whole, brings_keys=brings_keys))
        if not any(self._by_pages):
            return metadata
        whole, count = metadata.whole, _num_single(common)
        decode = None
        if count:
            decode = self._decode_step(whole, count, common)
        skipped = count if decode is not None else 0
        rest: PromptStep | None = None
        if common.num_actual_tokens > skipped:
            others = None if host is None else host[skipped:]
            num_keys = _num_keys(others, common.num_reqs - skipped, whole.max_key_len)
            rest = whole.after(skipped, num_keys)
            rest = replace(rest, brings_keys=self._brings_keys(common, skipped))
        return replace(metadata, decode=decode, rest=rest)

    def _decode_step(
        self, whole: PromptStep, count: int, common: CommonAttentionMetadata
    ) -> DecodeStep | None:
        lens, table = whole.key_lens, whole.block_table
        if lens is None or table is None:
            return None
        buffers = self._buffers_for(common)
        if whole.keyless is not None:
            lens = buffers.kept("decode lengths", lens.clamp(min=1))
            table = whole.keyless.table(table)
        table = table[:count]
        if not table.is_contiguous():
            table = buffers.kept("decode table", table.flatten()).view(table.shape)
        size = workspace_bytes(self._layer, count, whole.max_key_len)
        return DecodeStep(
            key_lens=lens[:count],
            block_table=table,
            max_key_len=whole.max_key_len,
            workspace=buffers.of("workspace", size, torch.uint8),
        )

    def _brings_keys(self, common: CommonAttentionMetadata, skipped: int) -> bool:
        """Whether the call's own keys are all that the rows after the first requests see."""
        lens = common.seq_lens_cpu if common.seq_lens_cpu_is_exact else None
        if lens is None or self._layer.attn_type is not AttentionType.DECODER:
            return False
        if _size_of(common) in self._bounds:
            return False  # later batches of this size have keys in the cache
        return bool((lens == common.query_lens_cpu)[skipped:].all())

    def _with_keyless(
        self, step: PromptStep, common: CommonAttentionMetadata, lens: Tensor
    ) -> PromptStep:
        keyless = keyless_of(
            common.query_start_loc,
            lens,
            num_tokens=common.num_actual_tokens,
            num_columns=1,
            buffers=self._buffers_for(common),
        )
        return replace(step, keyless=keyless)

    def _key_lens(self, common: CommonAttentionMetadata) -> tuple[Tensor, int]:
        """Return the keys of each request on the device, and a bound of the longest."""
        if self._layer.attn_type is not AttentionType.ENCODER_DECODER:
            return common.seq_lens, common.max_seq_len
        lens, host = common.encoder_seq_lens, common.encoder_seq_lens_cpu
        if lens is None:
            raise MetadataError.for_argument(
                "encoder_seq_lens", None, "(num_reqs,) int32 with cross-attention"
            )
        if host is not None:
            return lens, int(host.max()) if len(host) else 0
        return lens, require_block_table(common).shape[1] * self._block_size

    def _host_lens(self, common: CommonAttentionMetadata) -> Tensor | None:
        is_cross = self._layer.attn_type is AttentionType.ENCODER_DECODER
        return common.encoder_seq_lens_cpu if is_cross else common.seq_lens_cpu

    def _has_keys(self, common: CommonAttentionMetadata) -> bool:
        """Whether the host knows that every request has keys; a captured batch is never sure."""
        if _size_of(common) in self._bounds:
            return False
        host = self._host_lens(common)
        is_cross = self._layer.attn_type is AttentionType.ENCODER_DECODER
        is_exact = is_cross or common.seq_lens_cpu_is_exact
        return host is not None and is_exact and bool((host > 0).all())

    def _captured_bound(self, common: CommonAttentionMetadata, longest: int) -> int:
        captured = self._bounds.get(_size_of(common), 0)
        return captured if longest <= captured else longest

    def _buffers_for(self, common: CommonAttentionMetadata) -> Buffers:
        """Return where a batch's tensors are made: kept for those of a captured size alone."""
        is_captured = _size_of(common) in self._bounds
        return self._kept if is_captured else Buffers(self.device, is_kept=False)


def _size_of(common: CommonAttentionMetadata) -> tuple[int, int]:
    return (common.num_reqs, common.num_actual_tokens)


def _num_single(common: CommonAttentionMetadata) -> int:
    """Return how many leading requests have one query token each."""
    count = split_decodes_and_prefills(common, decode_threshold=1).num_decodes
    is_single = common.query_lens_cpu[:count] == 1
    return count if bool(is_single.all()) else int(is_single.int().argmin())


def _num_keys(host: Tensor | None, num_reqs: int, longest: int) -> int:
    """Return a bound of all keys together."""
    return num_reqs * longest if host is None else int(host.sum())
