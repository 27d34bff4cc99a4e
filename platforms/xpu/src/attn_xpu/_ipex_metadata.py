"""IPEX's step: what the calls of a group of layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.checked import check_metadata
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType, Window
from attn_shared.served import require_batch_served, require_block_table, require_served
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_xpu._ipex_calls import IpexStep
from attn_xpu._ipex_capability import NAME, capability_of
from attn_xpu._ipex_loaded import loaded_build
from attn_xpu._keyless_rows import keyless_rows, with_one_key

__all__ = ["CACHE_FREE", "IpexMetadata", "IpexMetadataBuilder"]

CACHE_FREE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

_SHARED = ("attn_type", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype")
_NO_ROWS: Mapping[Window, Tensor] = {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IpexMetadata:
    """One step, as the layers of a group read it.

    Attributes:
        num_actual_tokens: query rows that belong to requests.
        num_keys: keys that a cache-free call brings; 0 with a cache.
        step: the call.
        keyless: by window, the rows (T,) that see no key; empty where there are none.
        key_lens: (B,) int32 as the batch gives them.
    """

    num_actual_tokens: int
    num_keys: int
    step: IpexStep
    key_lens: Tensor
    keyless: Mapping[Window, Tensor] = field(default_factory=lambda: _NO_ROWS)


class IpexMetadataBuilder(AttentionMetadataBuilder[IpexMetadata]):
    """Describes a batch to the library; host lengths may be upper bounds, any order is fine.

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
            VendorMissingError: the library does not load.
        """
        super().__init__(kv_cache_spec, layers, config, device)
        self._layer = require_uniform(layers, _SHARED)
        self._capability = capability_of(loaded_build())
        for layer in layers.values():
            require_served(NAME, self._capability, layer)
        if config.batch_invariant:
            raise UnsupportedOptionError(
                f"batch_invariant=True is not served by {NAME}; allowed: False.",
                hint="single queries go another way than those of a mixed batch.",
            )
        self._is_cached = self._layer.attn_type not in CACHE_FREE
        self._block_size = self.shared_block_size() if self._is_cached else 0
        self._by_window = {layer.window: layer for layer in layers.values()}

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return NEVER: the library does not speak of graphs."""
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> IpexMetadata:
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
        if common.query_start_loc.device.type != self.device.type:
            raise MetadataError.for_argument(
                "the batch's device", common.query_start_loc.device, f"{self.device}, the builder's"
            )
        return self._paged(common) if self._is_cached else self._ragged(common)

    def _paged(self, common: CommonAttentionMetadata) -> IpexMetadata:
        is_cross = self._layer.attn_type is AttentionType.ENCODER_DECODER
        table, key_lens = require_block_table(common), common.seq_lens
        longest = common.max_seq_len
        if is_cross:
            if common.encoder_seq_lens is None:
                raise MetadataError.for_argument(
                    "encoder_seq_lens", None, "(num_reqs,) int32 with cross-attention"
                )
            key_lens = common.encoder_seq_lens
            longest = table.shape[1] * self._block_size
        causal = common.causal is True and not is_cross
        lens, table = with_one_key(key_lens, table)
        step = IpexStep(
            query_start_loc=common.query_start_loc.contiguous(),
            key_start_loc=_starts(lens),
            key_lens=lens,
            max_query_len=max(1, common.max_query_len),
            max_key_len=max(1, longest),
            causal=causal,
            is_single=bool((common.query_lens_cpu == 1).all()),
            block_table=table.contiguous(),
        )
        return IpexMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_keys=0,
            step=step,
            key_lens=key_lens,
            keyless=self._keyless(common, key_lens, causal),
        )

    def _ragged(self, common: CommonAttentionMetadata) -> IpexMetadata:
        starts, host = common.key_start_loc, common.key_start_loc_cpu
        if starts is None or host is None:
            starts, host = common.query_start_loc, common.query_start_loc_cpu
        longest = int(host.diff().max()) if common.num_reqs else 0
        step = IpexStep(
            query_start_loc=common.query_start_loc,
            key_start_loc=starts,
            key_lens=starts.diff(),
            max_query_len=max(1, common.max_query_len),
            max_key_len=max(1, longest),
            causal=False,
            is_single=False,
        )
        return IpexMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_keys=int(host[-1]),
            step=step,
            key_lens=step.key_lens,
            keyless=self._keyless(common, step.key_lens, False),
        )

    def _keyless(
        self, common: CommonAttentionMetadata, key_lens: Tensor, causal: bool
    ) -> Mapping[Window, Tensor]:
        """Return the rows without keys for each window; on the host only where there are some."""
        if not common.num_actual_tokens:
            return _NO_ROWS
        rows = {
            window: keyless_rows(
                common.query_start_loc,
                key_lens,
                common.num_actual_tokens,
                causal=causal,
                window=window,
            )
            for window in self._by_window
        }
        is_on_host = key_lens.device.type == "cpu"
        return {w: found for w, found in rows.items() if not is_on_host or bool(found.any())}

    def update_block_table(
        self, metadata: IpexMetadata, block_table: Tensor, slot_mapping: Tensor
    ) -> IpexMetadata:
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
        _, table = with_one_key(metadata.key_lens, block_table)
        return replace(metadata, step=replace(metadata.step, block_table=table.contiguous()))


def _starts(lens: Tensor) -> Tensor:
    """Return prefix sums (B + 1,) int32."""
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
    return starts
