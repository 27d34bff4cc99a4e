"""XPU_FLASH_ATTN's step: what the calls of a group share, without a look at the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.checked import check_metadata
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType, Window
from attn_shared.served import require_batch_served, require_block_table, require_served
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_xpu._keyless_rows import keyless_rows, with_one_key
from attn_xpu._xpu_fa_calls import KeyStep
from attn_xpu._xpu_fa_capability import NAME, capability_of_kernels

__all__ = ["CACHE_FREE", "XpuFlashAttnMetadata", "XpuFlashAttnMetadataBuilder"]

CACHE_FREE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

_SHARED = ("attn_type", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype")
_NO_ROWS: Mapping[Window, Tensor] = {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class XpuFlashAttnMetadata:
    """One step, as the layers of a group read it.

    Attributes:
        num_actual_tokens: query rows that belong to requests.
        num_reqs: B.
        num_keys: keys that a cache-free call brings; 0 with a cache.
        step: the call.
        keyless: by window, the rows (T,) that see no key; empty where there are none.
        key_lens: (B,) int32 as the batch gives them, where a request may have none; else None.
    """

    num_actual_tokens: int
    num_reqs: int
    num_keys: int
    step: KeyStep
    keyless: Mapping[Window, Tensor] = field(default_factory=lambda: _NO_ROWS)
    key_lens: Tensor | None = None


class XpuFlashAttnMetadataBuilder(AttentionMetadataBuilder[XpuFlashAttnMetadata]):
    """Describes a batch to the kernels; host lengths may be upper bounds, any order is fine.

    A prefix that all requests share is attended with the rest: `common_prefix_len` is checked and
    saves nothing.
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
        """
        super().__init__(kv_cache_spec, layers, config, device)
        self._layer = require_uniform(layers, _SHARED)
        self._capability = capability_of_kernels(Inventory())
        for layer in layers.values():
            require_served(NAME, self._capability, layer)
        if config.batch_invariant:
            raise UnsupportedOptionError(
                f"batch_invariant=True is not served by {NAME}; allowed: False.",
                hint="its kernels split keys by the batch; TRITON_ATTN and TORCH_SDPA do not.",
            )
        self._is_cached = self._layer.attn_type not in CACHE_FREE
        self._block_size = self.shared_block_size() if self._is_cached else 0
        self._by_window = {layer.window: layer for layer in layers.values()}

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return NEVER: the library's own test of a captured call is expected to fail."""
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> XpuFlashAttnMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens of a shared prefix, checked and otherwise without effect.
            common: the batch.
            fast_build: without effect: there is one way to build.

        Raises:
            MetadataError: lengths contradict each other or the block table, or the prefix is none.
            UnsupportedOptionError: the batch asks for what the capability does not name.
        """
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
        for layer in self._by_window.values():
            require_batch_served(NAME, self._capability, layer, common, common_prefix_len)
        self._check_device(common.query_start_loc)
        return self._paged(common) if self._is_cached else self._ragged(common)

    def _paged(self, common: CommonAttentionMetadata) -> XpuFlashAttnMetadata:
        is_cross = self._layer.attn_type is AttentionType.ENCODER_DECODER
        key_lens, host, longest = common.seq_lens, common.seq_lens_cpu, common.max_seq_len
        is_exact = common.seq_lens_cpu_is_exact
        table = require_block_table(common)
        if is_cross:
            key_lens, host, longest = self._encoder_lens(common, table)
            is_exact = True
        causal = common.causal is True and not is_cross
        keyless = self._keyless(common, key_lens, host if is_exact else None, causal)
        step = KeyStep(
            query_start_loc=common.query_start_loc,
            max_query_len=self._max_query_len(common),
            max_key_len=max(1, longest),
            causal=causal,
            key_lens=key_lens,
            block_table=table,
            has_decodes=self._has_decodes(common),
        )
        if keyless:
            lens, table = with_one_key(key_lens, table)
            step = replace(step, key_lens=lens, block_table=table)
        return XpuFlashAttnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            num_keys=0,
            step=step,
            keyless=keyless,
            key_lens=key_lens if keyless else None,
        )

    def _ragged(self, common: CommonAttentionMetadata) -> XpuFlashAttnMetadata:
        starts, host = common.key_start_loc, common.key_start_loc_cpu
        if starts is None or host is None:
            starts, host = common.query_start_loc, common.query_start_loc_cpu
        longest = int(host.diff().max()) if common.num_reqs else 0
        step = KeyStep(
            query_start_loc=common.query_start_loc,
            max_query_len=max(1, common.max_query_len),
            max_key_len=max(1, longest),
            causal=False,
            key_start_loc=starts,
            has_decodes=False,
        )
        return XpuFlashAttnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            num_keys=int(host[-1]),
            step=step,
            keyless=self._keyless(common, starts.diff(), host.diff(), False),
        )

    def _keyless(
        self, common: CommonAttentionMetadata, key_lens: Tensor, host: Tensor | None, causal: bool
    ) -> Mapping[Window, Tensor]:
        """Return the rows without keys for each window, or nothing where the host rules them out.

        Where a request has as many keys as queries every row sits at a key and sees that one.
        """
        tokens = common.num_actual_tokens
        if not tokens:
            return _NO_ROWS
        if host is not None and bool((host >= common.query_lens_cpu).all()) and int(host.min()) > 0:
            return _NO_ROWS
        return {
            window: keyless_rows(
                common.query_start_loc, key_lens, tokens, causal=causal, window=window
            )
            for window in self._by_window
        }

    def _encoder_lens(
        self, common: CommonAttentionMetadata, table: Tensor
    ) -> tuple[Tensor, Tensor | None, int]:
        lens, host = common.encoder_seq_lens, common.encoder_seq_lens_cpu
        if lens is None:
            raise MetadataError.for_argument(
                "encoder_seq_lens", None, "(num_reqs,) int32 with cross-attention"
            )
        bound = table.shape[1] * self._block_size
        if host is not None:
            bound = int(host.max()) if len(host) else 0
        return lens, host, bound

    def _max_query_len(self, common: CommonAttentionMetadata) -> int:
        """Return the bound that the library is told.

        A bound of 1 sends the step to the kernel for single queries, which takes row i for
        request i.
        """
        if common.max_query_len > 1:
            return common.max_query_len
        return 1 if common.num_actual_tokens == common.num_reqs else 2

    @staticmethod
    def _has_decodes(common: CommonAttentionMetadata) -> bool:
        """Whether every request has a row, so that short ones may go another way."""
        return bool((common.query_lens_cpu > 0).all())

    def update_block_table(
        self, metadata: XpuFlashAttnMetadata, block_table: Tensor, slot_mapping: Tensor
    ) -> XpuFlashAttnMetadata:
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
        if metadata.key_lens is not None:
            _, block_table = with_one_key(metadata.key_lens, block_table)
        return replace(metadata, step=replace(metadata.step, block_table=block_table))

    def _check_device(self, tensor: Tensor) -> None:
        if tensor.device.type != self.device.type:
            raise MetadataError.for_argument(
                "the batch's device", tensor.device, f"{self.device}, the builder's"
            )
