"""FLASHINFER_TRTLLM's step: direct parts where the phase may have them, planned ones elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from attn_cuda import _fi_loaded
from attn_cuda._fi_direct import DirectPart, Keyless
from attn_cuda._fi_metadata import FlashInferMetadataBuilder
from attn_cuda._fi_parts import CascadePart, Part
from attn_cuda._fi_rows import Rows, cut, keyless_rows
from attn_cuda._fi_trtllm import DECODE, PREFILL, TrtllmCase, kernels_of, use_trtllm
from attn_cuda._fi_trtllm_capability import NAME_TRTLLM, capability_trtllm
from attn_cuda._vendor import flashinfer
from attn_shared.backend import AttentionCGSupport
from attn_shared.capability import Capability
from attn_shared.errors import MetadataError
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["FlashInferTrtllmMetadataBuilder"]


class FlashInferTrtllmMetadataBuilder(FlashInferMetadataBuilder):
    """Describes decodes, and on Blackwell prefills, to kernels that read the block table.

    On Blackwell decodes of several query tokens, all as many, are one call as well.
    """

    backend_name: ClassVar[str] = NAME_TRTLLM

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Decide which phase runs on which kernels.

        Raises:
            UnsupportedOptionError: layers differ in what one plan must share.
            VendorMissingError: nothing is loaded.
        """
        super().__init__(kv_cache_spec, layers, config, device)
        facts = self._loaded.device
        self._decode_kernels = kernels_of(facts, DECODE) if self._may(DECODE) else None
        self._prefill_kernels = kernels_of(facts, PREFILL) if self._may(PREFILL) else None
        if self._decode_kernels == "xqa" and not self._has_pages_of_whole_heads():
            self._decode_kernels = None
        if self._decode_kernels == "trtllm-gen":
            self.reorder_batch_threshold = 1 + config.num_spec_tokens
        self._kept: dict[str, Tensor] = {}

    def _may(self, phase: str) -> bool:
        key, cache = self._key, self.kv_cache_spec
        case = TrtllmCase(
            phase=phase,
            num_heads=key.num_heads,
            num_kv_heads=key.num_kv_heads,
            kv_cache_dtype=cache.kv_cache_dtype if isinstance(cache, AttentionSpec) else "auto",
            has_sinks=any(layer.has_sinks for layer in self._distinct),
            force=True,
        )
        return use_trtllm(case, self._loaded.device)

    def _has_pages_of_whole_heads(self) -> bool:
        """Whether the distance of two pages is a number of heads, in which XQA counts it.

        It rounds others down, and takes gaps for keys (met on an H200): FLASHINFER's decode reads
        these.
        """
        cache, key = self.kv_cache_spec, self._key
        if not isinstance(cache, AttentionSpec):
            return False
        return cache.page_size_bytes % (key.head_size * key.kv_dtype.itemsize) == 0

    @staticmethod
    def _capability_of(loaded: _fi_loaded.Loaded) -> Capability:
        return capability_trtllm(loaded.device, loaded.inventory)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return UNIFORM_BATCH where trtllm-gen alone can be meant; XQA takes single queries."""
        if _fi_loaded.families() != frozenset({10}):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def _split(self, rows: Rows) -> tuple[Rows | None, Rows | None]:
        """Take a batch of equally many queries, at most the threshold or captured, as decodes."""
        if rows.causal and rows.num_tokens and self._decode_kernels == "trtllm-gen":
            count, each = len(rows.seq_lens), rows.max_query_len
            is_uniform = rows.num_tokens == each * count
            is_few = each <= (self.reorder_batch_threshold or 1) or rows.num_tokens in self._sizes
            if is_uniform and is_few:
                return rows, None
        return super()._split(rows)

    def _decode(self, rows: Rows) -> Part:
        if self._decode_kernels is None:
            return super()._decode(rows)
        count = len(rows.seq_lens)
        is_captured = not self._sizes.isdisjoint({count, rows.num_tokens})
        table = self._table(rows.block_table, is_captured)
        longest = int(rows.seq_lens.max())
        return DirectPart(
            key=self._key,
            kernels=self._decode_kernels,
            kernel=flashinfer.trtllm_call("decode"),
            first=rows.first,
            last=rows.last,
            block_table=table,
            seq_lens=rows.device_lens,
            # A replay keeps the number of the capture, so that it is what the table holds.
            max_seq_len=table.shape[1] * self._block_size if is_captured else max(1, longest),
            queries_per_request=rows.num_tokens // count,
            keyless=self._captured_keyless(rows) if is_captured else _keyless(rows),
        )

    def _table(self, block_table: Tensor, is_captured: bool) -> Tensor:
        if block_table.is_contiguous():
            return block_table
        if is_captured:
            raise MetadataError.for_argument(
                "block_table strides", block_table.stride(), "contiguous, in a captured batch"
            )
        return block_table.contiguous()

    def _captured_keyless(self, rows: Rows) -> Keyless:
        """Return which rows have no key, worked out on the device at an address that stays."""
        name = f"keyless {rows.num_tokens}"
        each = rows.num_tokens // len(rows.seq_lens)
        is_keyless = (rows.device_lens < 1).repeat_interleave(each, output_size=rows.num_tokens)
        if name not in self._kept:
            with torch.inference_mode(mode=False):
                self._kept[name] = torch.empty_like(is_keyless)
        return Keyless(rows=self._kept[name].copy_(is_keyless))

    def _prefill(self, rows: Rows) -> Part:
        if self._prefill_kernels is None or not rows.causal:
            return super()._prefill(rows)
        return self._context(_with_rows(rows), self._prefill_kernels)

    def _context(self, rows: Rows, kernels: str) -> DirectPart:
        key_starts = torch.zeros(len(rows.seq_lens) + 1, dtype=torch.int32)
        torch.cumsum(rows.seq_lens, 0, dtype=torch.int32, out=key_starts[1:])
        device = rows.block_table.device
        return DirectPart(
            key=self._key,
            kernels=kernels,
            kernel=flashinfer.trtllm_call("context"),
            first=rows.first,
            last=rows.last,
            block_table=self._table(rows.block_table, is_captured=False),
            seq_lens=rows.device_lens,
            max_seq_len=max(1, int(rows.seq_lens.max())),
            queries_per_request=0,
            max_query_len=rows.max_query_len,
            causal=rows.causal,
            query_start_loc=rows.query_start_loc.to(device, non_blocking=True),
            key_start_loc=key_starts.to(device, non_blocking=True),
            keyless=_keyless(rows),
        )

    def _cascade(self, length: int, rows: Rows) -> Part:
        """Attend to prefix and rest by the context call, which returns an LSE to merge by."""
        kernels = self._prefill_kernels
        if kernels is None:
            return super()._cascade(length, rows)
        prefix, suffix = self._levels(length, rows)
        of_prefix = torch.full_like(rows.device_lens[:1], length)
        parts = (
            self._context(replace(prefix, device_lens=of_prefix), kernels),
            self._context(replace(suffix, device_lens=rows.device_lens - length), kernels),
        )
        return CascadePart(
            lease=None,
            num_tokens=rows.num_tokens,
            apart=lambda _has_lse: parts,
            merge=self._portable.merge,
        )


def _keyless(rows: Rows) -> Keyless | None:
    found = keyless_rows(rows)
    return None if found is None else Keyless(rows=found)


def _with_rows(rows: Rows) -> Rows:
    """Drop requests at the end that have no rows."""
    lens = rows.query_start_loc.diff()
    count = int(lens.nonzero()[-1]) + 1
    return cut(rows, 0, count)
