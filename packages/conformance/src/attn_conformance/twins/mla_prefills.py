"""Twins for latents that prefill wrongly, or lay a step out wrongly."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.mla_reference_backend import (
    MLA_REFERENCE_CAPABILITY,
    MLAReferenceBuilder,
    MLAReferenceImpl,
    MLAReferencePrefill,
)
from attn_conformance.twins.mla import MLATwin
from attn_shared.backend import AttentionCGSupport
from attn_shared.capability import DeviceLimit
from attn_shared.device import Vendor
from attn_shared.errors import AttnError
from attn_shared.impl import MLALayer
from attn_shared.kv_cache import KVCacheSpec, MLAAttentionSpec
from attn_shared.kv_write import concat_and_cache_mla
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_metadata import MLAMetadata, RaggedPart
from attn_shared.reference import ReferenceResult
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["TWINS"]


class PrefillSeesAll(MLATwin):
    """Prefills without a causal mask."""

    breaks = ("mla_prefill",)

    class prefill(MLAReferencePrefill):
        def attend(
            self, query: Tensor, key: Tensor, value: Tensor, part: RaggedPart
        ) -> ReferenceResult:
            return super().attend(query, key, value, replace(part, is_causal=False))


class DropsLastChunk(MLATwin):
    """Leaves out the last chunk of earlier keys."""

    breaks = ("mla_context",)

    class builder(MLAReferenceBuilder):
        def _context(self, *arguments: Any) -> Any:
            return super()._context(*arguments)[:-1]


class MergesByHalves(MLATwin):
    """Averages the results of chunks, whatever their denominators."""

    breaks = ("mla_context", "mla_generated")

    class impl(MLAReferenceImpl):
        @staticmethod
        def merge_into(total: Tensor, total_lse: Tensor, found: Tensor, lse: Tensor) -> None:
            total.add_(found).div_(2)
            torch.logaddexp(total_lse, lse, out=total_lse)


class PrefillRowsFromTheTop(MLATwin):
    """Prefills the step's first rows, where its decodes are."""

    breaks = ("mla_mixed",)

    class impl(MLAReferenceImpl):
        def forward_mha(
            self,
            layer: MLALayer,
            query: Tensor,
            latent: Tensor,
            rope: Tensor,
            kv_cache: Tensor,
            metadata: MLAMetadata[CommonAttentionMetadata],
            output: Tensor,
            *,
            lse: Tensor | None = None,
        ) -> None:
            moved = query.roll(1, dims=0) if metadata.num_decode_tokens else query
            super().forward_mha(layer, moved, latent, rope, kv_cache, metadata, output, lse=lse)


class TakesAnyOrder(MLATwin):
    """Takes decodes behind longer rows for prefills, without a word."""

    breaks = ("mla_mixed",)

    class builder(MLAReferenceBuilder):
        def _refuse_late_decodes(self, *arguments: Any) -> None:
            return


class CountsAllAsDecodes(MLATwin):
    """Hands rows to the decode kernel that are longer than it says."""

    breaks = ("mla_split",)

    class builder(MLAReferenceBuilder):
        def _num_decodes(self, query_lens: Any) -> int:
            return len(query_lens)


class ReadsOwnTokensFresh(MLATwin):
    """Prefills with latents of the step that are not quite those which its fp8 cache holds."""

    breaks = ("mla_fp8",)

    class impl(MLAReferenceImpl):
        def forward_mha(
            self,
            layer: MLALayer,
            query: Tensor,
            latent: Tensor,
            rope: Tensor,
            kv_cache: Tensor,
            metadata: MLAMetadata[CommonAttentionMetadata],
            output: Tensor,
            *,
            lse: Tensor | None = None,
        ) -> None:
            cache = self.spec.kv_cache_spec
            if isinstance(cache, MLAAttentionSpec) and cache.is_quantized:
                latent = latent * 1.02
            super().forward_mha(layer, query, latent, rope, kv_cache, metadata, output, lse=lse)


class RopeFirst(MLATwin):
    """Stores the rope part before the latent."""

    breaks = ("mla_cache_update",)

    class impl(MLAReferenceImpl):
        def do_kv_cache_update(
            self,
            layer: Any,
            latent: Tensor,
            rope: Tensor,
            kv_cache: Tensor,
            slot_mapping: Tensor,
        ) -> None:
            entry = torch.cat([rope, latent], dim=1)
            rank = latent.shape[1]
            super().do_kv_cache_update(
                layer, entry[:, :rank], entry[:, rank:], kv_cache, slot_mapping
            )


class WritesNegativeSlots(MLATwin):
    """Writes slot -1, which Python takes for the last."""

    breaks = ("mla_cache_update",)

    class impl(MLAReferenceImpl):
        def do_kv_cache_update(
            self,
            layer: Any,
            latent: Tensor,
            rope: Tensor,
            kv_cache: Tensor,
            slot_mapping: Tensor,
        ) -> None:
            blocks, size, _ = kv_cache.shape
            slots = torch.where(slot_mapping < 0, blocks * size - 1, slot_mapping)
            cache = self.spec.kv_cache_spec
            if isinstance(cache, MLAAttentionSpec):
                concat_and_cache_mla(kv_cache, cache, latent, rope, slots, scale=layer.k_scale)


class NeedsARequest(MLATwin):
    """Counts the longest query of no requests at all."""

    breaks = ("mla_empty_batch",)
    raises = True

    class builder(MLAReferenceBuilder):
        def _num_decodes(self, query_lens: Any) -> int:
            longest = int(max(query_lens))
            return super()._num_decodes(query_lens) if longest >= 0 else 0


class OwnOutput(MLATwin):
    """Returns a new output and leaves the given one as it was."""

    breaks = ("mla_output",)

    class impl(MLAReferenceImpl):
        def forward_mqa(
            self,
            layer: Any,
            query: Tensor,
            kv_cache: Tensor,
            metadata: MLAMetadata[CommonAttentionMetadata],
            output: Tensor | None = None,
            *,
            lse: Tensor | None = None,
        ) -> Tensor:
            self.check_call(layer, query, kv_cache, metadata, output, lse)
            return super().forward_mqa(layer, query, kv_cache, metadata, lse=lse)


class UndeclaredLevel(MLATwin):
    """Answers with a number that is no graph level."""

    breaks = ("mla_graph_level",)

    class builder(MLAReferenceBuilder):
        @classmethod
        def get_cudagraph_support(
            cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
        ) -> AttentionCGSupport:
            return 2  # type: ignore[return-value]


class MovesBuffers(MLATwin):
    """Captures copies, which later steps do not reach."""

    breaks = ("mla_capture_pointers", "mla_replay")

    class builder(MLAReferenceBuilder):
        def build_decode(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
            table = common.block_table
            return common.with_fields(
                seq_lens=common.seq_lens.clone(),
                block_table=None if table is None else table.clone(),
            )


class CapturesPrefills(MLATwin):
    """Captures a batch with prefills as any other."""

    breaks = ("mla_captured_prefill",)

    class builder(MLAReferenceBuilder):
        def build_for_cudagraph_capture(
            self, common: CommonAttentionMetadata
        ) -> MLAMetadata[CommonAttentionMetadata]:
            return self.build(0, common)


class WaitsForTheDevice(MLATwin):
    """Looks at a length on the device in every call."""

    breaks = ("mla_no_synchronisation",)
    raises = True
    needs_cuda = True
    served = replace(MLA_REFERENCE_CAPABILITY, devices=(DeviceLimit(vendor=Vendor.NVIDIA),))

    class impl(MLAReferenceImpl):
        def check_spec(self, spec: LayerSpec) -> None:
            return  # it would ask about a CPU

        def attend(self, layer: Any, query: Tensor, kv_cache: Tensor, common: Any) -> Any:
            int(common.seq_lens.sum())
            return super().attend(layer, query, kv_cache, common)


class HasForward(MLATwin):
    """Has a forward, as ordinary attention does."""

    breaks = ("mla_forward",)

    class impl(MLAReferenceImpl):
        def forward(self, *arguments: Any) -> None:  # type: ignore[override,misc]
            """Do nothing."""


class TakesAnyLayer(MLATwin):
    """Builds whatever layer it is given."""

    breaks = ("mla_layer",)

    class impl(MLAReferenceImpl):
        def check_spec(self, spec: LayerSpec) -> None:
            return


class TakesAnyBlocks(MLATwin):
    """Serves blocks of 16, says so, and builds a layer with others."""

    breaks = ("mla_unserved",)
    served = replace(MLA_REFERENCE_CAPABILITY, block_sizes=(16,))

    class impl(MLAReferenceImpl):
        def check_spec(self, spec: LayerSpec) -> None:
            return


class TakesAnyDecode(MLATwin):
    """Looks at no argument of a decode."""

    breaks = ("mla_decode_input",)

    class impl(MLAReferenceImpl):
        def check_call(
            self,
            layer: Any,
            query: Tensor,
            kv_cache: Tensor,
            metadata: MLAMetadata[CommonAttentionMetadata],
            output: Tensor | None,
            lse: Tensor | None,
        ) -> Tensor:
            return query if output is None else output


class TakesAnothersDecodes(MLATwin):
    """Does not say what its decodes are, so that another backend's are taken for its own."""

    breaks = ("mla_decode_input",)

    class impl(MLAReferenceImpl):
        decode_type = object


class SwallowsRefusals(MLATwin):
    """Leaves the output alone where an argument of a prefill is wrong, without a word."""

    breaks = ("mla_prefill_input",)

    class impl(MLAReferenceImpl):
        def forward_mha(self, *arguments: Any, lse: Tensor | None = None) -> None:
            with contextlib.suppress(AttnError):
                super().forward_mha(*arguments, lse=lse)


class TakesOtherBlocks(MLATwin):
    """Does not ask what blocks a batch was described for."""

    breaks = ("mla_other_blocks",)

    class builder(MLAReferenceBuilder):
        def build(  # type: ignore[misc]
            self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
        ) -> MLAMetadata[CommonAttentionMetadata]:
            return super().build(common_prefix_len, common.with_fields(block_size=None))


TWINS: tuple[type[MLATwin], ...] = (
    PrefillSeesAll,
    DropsLastChunk,
    MergesByHalves,
    PrefillRowsFromTheTop,
    TakesAnyOrder,
    CountsAllAsDecodes,
    ReadsOwnTokensFresh,
    RopeFirst,
    WritesNegativeSlots,
    NeedsARequest,
    OwnOutput,
    UndeclaredLevel,
    MovesBuffers,
    CapturesPrefills,
    WaitsForTheDevice,
    HasForward,
    TakesAnyLayer,
    TakesAnyBlocks,
    TakesAnyDecode,
    TakesAnothersDecodes,
    SwallowsRefusals,
    TakesOtherBlocks,
)
