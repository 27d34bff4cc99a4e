"""FLASH_ATTN's step: what the calls of a group of layers share, without a look at the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_cuda._fa_calls import schedule
from attn_cuda._fa_capability import NAME
from attn_cuda._fa_keyless import with_keys
from attn_cuda._fa_loaded import Loaded, provider_of, usable_anywhere
from attn_cuda._fa_providers import Provider
from attn_cuda._fa_step import KeyStep
from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.cascade import use_cascade
from attn_shared.checked import check_metadata
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType
from attn_shared.served import require_batch_served
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_shared.step_buffers import Buffers

__all__ = ["CACHE_FREE", "FlashAttnMetadata", "FlashAttnMetadataBuilder"]

CACHE_FREE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

_SHARED = (
    *("attn_type", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype"),
    *("batch_invariant", "flash_attn_version"),
)
_MOST_SPLITS = 32
_MOST_CUT_BY_LENGTH = 992  # requests; FlashAttention 3 cuts larger batches all alike
_TILE_ROWS = 128  # of queries times heads of a group
_USUAL_COMPUTE_UNITS = 132


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashAttnMetadata:
    """One step, as the layers of a group read it.

    Attributes:
        provider: the build that it was made for.
        num_actual_tokens: query rows that belong to requests.
        num_keys: keys that a cache-free call brings; 0 with a cache.
        step: the one call, or with a prefix that over what follows it.
        prefix: the call over a prefix that all requests share, or None.
    """

    provider: Provider
    num_actual_tokens: int
    num_keys: int
    step: KeyStep
    prefix: KeyStep | None = None


class FlashAttnMetadataBuilder(AttentionMetadataBuilder[FlashAttnMetadata]):
    """Describes a batch to FlashAttention; host lengths may be upper bounds, any order is fine.

    With `capture_sizes` every tensor that is made here stays at one address for batches of one
    size, and the number of splits depends on that size alone, so that `build` refreshes what a
    captured graph reads.
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
            UnsupportedOptionError: layers differ in what one plan must share, or one is not served.
            VendorMissingError: nothing is loaded.
        """
        super().__init__(kv_cache_spec, layers, config, device)
        self._layer = require_uniform(layers, _SHARED)
        self._provider, self._loaded = _one_provider(layers)
        self._is_cached = self._layer.attn_type not in CACHE_FREE
        self._block_size = self.shared_block_size() if self._is_cached else 0
        # What a batch is refused for depends on no more.
        self._distinct = tuple({_kind(layer): layer for layer in layers.values()}.values())
        self._is_invariant = config.batch_invariant or self._layer.batch_invariant
        self._is_captured = bool(config.capture_sizes)
        self._has_schedule = (
            self._provider.has_schedule
            and self._is_cached
            and not self._is_invariant
            and len({(layer.window, layer.softcap) for layer in layers.values()}) == 1
        )
        self._buffers = Buffers(device, is_kept=self._is_captured)
        # (requests, tokens, of single queries) -> bounds of queries and keys that were captured.
        self._bounds: dict[tuple[int, int, bool], tuple[int, int]] = {}

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return ALWAYS where FlashAttention 3 alone can be meant, else UNIFORM_BATCH.

        FlashAttention 2 chooses its kernel by the longest query, and FlashAttention 4 its grid by
        bounds of the host: both hold for batches of the lengths that were captured. Nor is more
        promised before any is loaded.
        """
        usable = usable_anywhere()
        is_third = usable and all(name.endswith("_3") or name == "fa3_fwd" for name in usable)
        return AttentionCGSupport.ALWAYS if is_third else AttentionCGSupport.UNIFORM_BATCH

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Sequence[int], num_compute_units: int
    ) -> bool:
        """Whether running the shared prefix once is expected to pay, for every layer."""
        return self._is_cached and all(
            use_cascade(
                common_prefix_len=common_prefix_len,
                query_lens=query_lens,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                num_compute_units=num_compute_units,
                has_alibi=layer.has_alibi,
                has_window=layer.window != (None, None),
                has_chunks=layer.chunk_size is not None,
                dcp_size=layer.dcp_size,
            )
            for layer in self._distinct
        )

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttnMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens of a shared prefix, attended once.
            common: the batch.
            fast_build: no schedule ahead of the layers.

        Raises:
            MetadataError: lengths contradict each other or the block table, or the prefix is none.
            UnsupportedOptionError: the batch asks for what the capability does not name.
        """
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
        capability = self._loaded.capability
        for layer in self._distinct:
            require_batch_served(NAME, capability, layer, common, common_prefix_len)
        self._check_device(common.query_start_loc)
        if common_prefix_len:
            return self._cascade(common_prefix_len, common)
        step = self._with_keys(common) if self._is_cached else self._ragged(common)
        if self._has_schedule and not fast_build and common.num_actual_tokens:
            step = step.with_schedule(self._schedule(step))
        return FlashAttnMetadata(
            provider=self._provider,
            num_actual_tokens=common.num_actual_tokens,
            num_keys=0 if self._is_cached else _num_keys(common),
            step=step,
        )

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> FlashAttnMetadata:
        """Return metadata to capture with; `build` bounds later batches of this size alike.

        By the bounds FlashAttention 3 drops masks and windows that hide nothing, and lays out its
        schedule: that of a replay must be laid out as the captured kernel reads it.
        """
        metadata = self.build(0, common)
        self._bounds[_size_of(common)] = (metadata.step.max_query_len, metadata.step.max_key_len)
        return metadata

    def _captured_bounds(
        self, common: CommonAttentionMetadata, max_query_len: int, max_key_len: int
    ) -> tuple[int, int]:
        """Return the bounds that a batch of this size was captured with, if it is within them."""
        most_rows, most_keys = self._bounds.get(_size_of(common), (0, 0))
        if max_query_len <= most_rows and max_key_len <= most_keys:
            return most_rows, most_keys
        return max_query_len, max_key_len

    def _paged(self, common: CommonAttentionMetadata) -> KeyStep:
        is_cross = self._layer.attn_type is AttentionType.ENCODER_DECODER
        key_lens, longest = common.seq_lens, common.max_seq_len
        if is_cross:
            key_lens, longest = self._encoder_lens(common)
        max_query_len, max_key_len = self._captured_bounds(
            common, self._max_query_len(common), max(1, longest)
        )
        return KeyStep(
            query_start_loc=common.query_start_loc,
            max_query_len=max_query_len,
            max_key_len=max_key_len,
            causal=common.causal is True and not is_cross,
            key_lens=key_lens,
            key_start_loc=self._starts("key_start_loc", key_lens),
            block_table=common.block_table,
            num_splits=self._num_splits(common),
        )

    def _with_keys(self, common: CommonAttentionMetadata) -> KeyStep:
        """Return the step with keys for all, for the library that must not meet a request without.

        A captured graph looks for such requests at every replay; else the host knows of them or
        not, where it was told upper bounds.
        """
        step, tokens = self._paged(common), common.num_actual_tokens
        if self._provider.version != 2 or not tokens:
            return step
        is_kept = not {tokens, common.num_reqs}.isdisjoint(self.config.capture_sizes)
        host = self._exact_key_lens(common)
        if not is_kept and host is not None and int(host.min()) > 0:
            return step
        buffers = self._buffers if is_kept else Buffers(self.device, is_kept=False)
        step = with_keys(step, num_tokens=tokens, block_size=self._block_size, buffers=buffers)
        if step.key_start_loc is None or step.key_lens is None:
            return step
        return replace(step, key_start_loc=self._starts("key_start_loc", step.key_lens))

    def _exact_key_lens(self, common: CommonAttentionMetadata) -> Tensor | None:
        if self._layer.attn_type is AttentionType.ENCODER_DECODER:
            return common.encoder_seq_lens_cpu
        return common.seq_lens_cpu if common.seq_lens_cpu_is_exact else None

    def _encoder_lens(self, common: CommonAttentionMetadata) -> tuple[Tensor, int]:
        lens, host = common.encoder_seq_lens, common.encoder_seq_lens_cpu
        if lens is None or common.block_table is None:
            raise MetadataError.for_argument(
                "encoder_seq_lens", None, "(num_reqs,) int32 with cross-attention"
            )
        bound = common.block_table.shape[1] * self._block_size
        if host is not None:
            bound = int(host.max()) if len(host) else 0
        return lens, bound

    def _ragged(self, common: CommonAttentionMetadata) -> KeyStep:
        host = common.key_start_loc_cpu
        longest = common.max_query_len
        if common.key_start_loc is not None and host is not None and common.num_reqs:
            longest = int(host.diff().max())
        return KeyStep(
            query_start_loc=common.query_start_loc,
            max_query_len=self._max_query_len(common),
            max_key_len=max(1, longest),
            causal=False,
            key_start_loc=common.query_start_loc
            if common.key_start_loc is None
            else common.key_start_loc,
            num_splits=1 if self._is_invariant else 0,
        )

    def _max_query_len(self, common: CommonAttentionMetadata) -> int:
        """Return the bound that a kernel is told.

        With a bound of 1 FlashAttention 2 takes row i for request i and splits keys by the batch,
        and both 2 and 3 drop the causal mask, and with it choose other tiles.
        """
        if common.max_query_len > 1:
            return common.max_query_len
        is_mixed = self._provider.version == 2 and common.num_actual_tokens != common.num_reqs
        return 2 if is_mixed or self._is_invariant else 1

    def _num_splits(self, common: CommonAttentionMetadata) -> int:
        """Return 1 in batch-invariant mode, 0 where the kernel may choose by each batch.

        A captured number of splits is that of all replays. FlashAttention 3 takes it as the most
        that a request may be cut into and works out on the device how many pay, so that it is what
        one long request among short ones wants. Others cut every request: as many as let one pass
        over all tiles fill the device.
        """
        if self._is_invariant:
            return 1
        if not self._is_captured or self._provider.version == 2:
            return 0
        layer = self._layer
        units = self._loaded.device.compute_units or _USUAL_COMPUTE_UNITS
        cuts_by_length = self._provider.version == 3 and common.num_reqs <= _MOST_CUT_BY_LENGTH
        is_single = cuts_by_length and common.max_query_len <= 1
        rows = (1 if is_single else common.num_actual_tokens) * layer.queries_per_kv
        tiles = max(1, -(-rows // _TILE_ROWS))
        if not cuts_by_length:
            tiles = max(tiles, common.num_reqs)
        return max(1, min(_MOST_SPLITS, units // (tiles * layer.num_kv_heads)))

    def _starts(self, name: str, key_lens: Tensor) -> Tensor | None:
        """Return prefix sums of key lengths for the library that asks for them."""
        if self._provider.library != "flash_attn":
            return None
        starts = self._buffers.of(name, len(key_lens) + 1, torch.int32)
        starts[:1] = 0
        torch.cumsum(key_lens, 0, dtype=torch.int32, out=starts[1:])
        return starts

    def _schedule(self, step: KeyStep) -> Tensor:
        layer, cache = self._layer, self.kv_cache_spec
        is_quantized = isinstance(cache, AttentionSpec) and cache.is_quantized
        dtype = cache.dtype if isinstance(cache, AttentionSpec) and is_quantized else layer.dtype
        found = schedule(self._provider, layer, step, page_size=self._block_size, dtype=dtype)
        return self._buffers.kept("schedule", found)

    def _cascade(self, length: int, common: CommonAttentionMetadata) -> FlashAttnMetadata:
        """Cut a batch into the prefix, one request of all rows, and what follows it."""
        table = common.block_table
        if table is None or any(_narrows(layer) for layer in self._distinct):
            raise UnsupportedOptionError(
                f"common_prefix_len={length} with a window or ALiBi; allowed: 0.",
                hint="ask use_cascade_attention first.",
            )
        step = self._paged(common)
        lens = common.seq_lens - length
        prefix_lens = torch.full((1,), length, dtype=torch.int32, device=self.device)
        rows = torch.zeros(2, dtype=torch.int32, device=self.device)
        rows[1:].fill_(common.num_actual_tokens)
        blocks = length // self._block_size
        prefix = replace(
            step,
            query_start_loc=rows,
            max_query_len=max(1, common.num_actual_tokens),
            max_key_len=length,
            causal=False,
            key_lens=prefix_lens,
            key_start_loc=self._starts("prefix_start_loc", prefix_lens),
            block_table=table[:1, :blocks],
        )
        suffix = replace(
            step,
            max_key_len=max(1, step.max_key_len - length),
            key_lens=lens,
            key_start_loc=self._starts("key_start_loc", lens),
            block_table=table[:, blocks:],
        )
        return FlashAttnMetadata(
            provider=self._provider,
            num_actual_tokens=common.num_actual_tokens,
            num_keys=0,
            step=suffix,
            prefix=prefix,
        )

    def update_block_table(
        self, metadata: FlashAttnMetadata, block_table: Tensor, slot_mapping: Tensor
    ) -> FlashAttnMetadata:
        """Return metadata of the same batch over another block table.

        Args:
            metadata: of the batch.
            block_table: (B, M) int32, as wide as the batch's longest request needs.
            slot_mapping: unused: it is handed to `do_kv_cache_update` by the caller.

        Raises:
            UnsupportedOptionError: the layers have no cache.
        """
        if not self._is_cached:
            raise UnsupportedOptionError("layers without a cache have no block table.")
        self._check_device(block_table)
        prefix, step = metadata.prefix, metadata.step
        if prefix is None:
            if step.keyless is not None:
                block_table = step.keyless.table(block_table)
            return replace(metadata, step=replace(step, block_table=block_table))
        blocks = prefix.max_key_len // self._block_size
        return replace(
            metadata,
            prefix=replace(prefix, block_table=block_table[:1, :blocks]),
            step=replace(step, block_table=block_table[:, blocks:]),
        )

    def _check_device(self, tensor: Tensor) -> None:
        if tensor.device.type != self.device.type:
            raise MetadataError.for_argument(
                "the batch's device", tensor.device, f"{self.device}, the builder's"
            )


def _one_provider(layers: Mapping[str, LayerSpec]) -> tuple[Provider, Loaded]:
    (first_name, first), *others = [(name, provider_of(layer)) for name, layer in layers.items()]
    for name, found in others:
        if found[0] != first[0]:
            raise UnsupportedOptionError(
                f"layers of one group share one plan: {first_name} runs on {first[0]}, {name} on "
                f"{found[0]}.",
                hint="put layers that differ into groups of their own.",
            )
    return first


def _kind(layer: LayerSpec) -> tuple[object, ...]:
    return (layer.window, layer.softcap, layer.has_alibi, layer.has_sinks)


def _size_of(common: CommonAttentionMetadata) -> tuple[int, int, bool]:
    return (common.num_reqs, common.num_actual_tokens, common.max_query_len <= 1)


def _narrows(layer: LayerSpec) -> bool:
    return layer.window != (None, None) or layer.has_alibi


def _num_keys(common: CommonAttentionMetadata) -> int:
    host = common.key_start_loc_cpu
    return common.num_actual_tokens if host is None else int(host[-1])
