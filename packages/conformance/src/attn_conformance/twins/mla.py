"""Twins for latents: the reference of latent attention with one thing wrong in its decodes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.mla_reference_backend import MLAReferenceBackend, MLAReferenceImpl
from attn_conformance.twins.twin import Broken
from attn_shared.backend import AttentionLayer
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import ReferenceResult

__all__ = ["TWINS", "MLATwin"]


class MLATwin(Broken, MLAReferenceBackend):
    """A backend for latents that is right but for one thing, which its docstring names."""

    name = "CONFORMANCE_MLA_TWIN"


class ScaledByEntry(MLATwin):
    """Scales logits by the width of an entry, whatever the layer says."""

    breaks = ("mla_decode", "mla_scale")

    class impl(MLAReferenceImpl):
        def arguments(self, layer: AttentionLayer, common: CommonAttentionMetadata) -> Any:
            found = super().arguments(layer, common)
            return found | {"scale": self.spec.head_size**-0.5}


class MissesLastKey(MLATwin):
    """Leaves out the newest key of each request that has more than one."""

    breaks = ("mla_decode", "mla_split", "mla_generated")

    class impl(MLAReferenceImpl):
        def arguments(self, layer: AttentionLayer, common: CommonAttentionMetadata) -> Any:
            found = super().arguments(layer, common)
            lens = torch.where(common.seq_lens > 1, common.seq_lens - 1, common.seq_lens)
            return found | {"seq_lens": lens, "causal": False}


class SeesLaterDrafts(MLATwin):
    """Has no causal mask among the tokens of one request."""

    breaks = ("mla_drafts", "mla_varlen")

    class impl(MLAReferenceImpl):
        def arguments(self, layer: AttentionLayer, common: CommonAttentionMetadata) -> Any:
            return super().arguments(layer, common) | {"causal": False}


class DecodesAlwaysCausal(MLATwin):
    """Masks decodes where the batch says that nothing is hidden."""

    breaks = ("mla_non_causal",)

    class impl(MLAReferenceImpl):
        def arguments(self, layer: AttentionLayer, common: CommonAttentionMetadata) -> Any:
            return super().arguments(layer, common) | {"causal": True}


class LongestQueryForAll(MLATwin):
    """Takes every request to have as many tokens as the longest, and reads beyond its rows."""

    breaks = ("mla_varlen",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            found = super().attend(layer, query, kv_cache, common)
            lens = common.query_lens_cpu
            if len(lens) and int(lens.min()) != int(lens.max()):
                return replace(found, output=found.output.roll(1, dims=0))
            return found


class LastHeadMissing(MLATwin):
    """Works on heads in pairs and leaves out the last of an odd number."""

    breaks = ("mla_heads",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            found = super().attend(layer, query, kv_cache, common)
            if self.spec.num_heads % 2:
                found.output[:, -1] = 0
            return found


class RopeOfEight(MLATwin):
    """Takes the rope part to be 8 wide, as in the narrowest layers."""

    breaks = ("mla_widths",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            beyond = self.spec.head_size_v + 8
            query = torch.cat([query[..., :beyond], 0 * query[..., beyond:]], dim=-1)
            return super().attend(layer, query, kv_cache, common)


class LatentLseInBits(MLATwin):
    """Returns log2 of the denominator and says that it is ln."""

    breaks = ("mla_lse",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            found = super().attend(layer, query, kv_cache, common)
            return replace(found, lse=found.lse / math.log(2))


class LatentScaleDropped(MLATwin):
    """Reads an fp8 cache without its scale."""

    breaks = ("mla_fp8",)

    class impl(MLAReferenceImpl):
        def arguments(self, layer: AttentionLayer, common: CommonAttentionMetadata) -> Any:
            return super().arguments(layer, common) | {"cache_scale": 1.0}


class DividesByNothing(MLATwin):
    """Divides by the denominator of a request that has no key."""

    breaks = ("mla_padded_requests",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            found = super().attend(layer, query, kv_cache, common)
            is_empty = (found.lse == -torch.inf).T
            return replace(found, output=found.output.masked_fill(is_empty.unsqueeze(2), torch.nan))


class WeighsTailsByZero(MLATwin):
    """Loads the block after a request's last, and weighs what it holds with 0."""

    breaks = ("mla_unread",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            found = super().attend(layer, query, kv_cache, common)
            table = common.block_table
            if table is None:
                return found
            counts = -(-common.seq_lens.long() // kv_cache.shape[1])
            beyond = table.gather(1, counts.clamp_max(table.shape[1] - 1).unsqueeze(1)).long()
            loaded = kv_cache[beyond.clamp(0, len(kv_cache) - 1)].double().sum()
            return replace(found, output=found.output + 0 * loaded)


class DenseBlocks(MLATwin):
    """Takes blocks to follow one another without gaps."""

    breaks = ("mla_padded_blocks",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            _, size, width = kv_cache.shape
            dense = kv_cache.as_strided(kv_cache.shape, (size * width, width, 1))
            return super().attend(layer, query, dense.nan_to_num(7.0), common)


class BlocksOfAtMost64(MLATwin):
    """Loads at most 64 tokens of a block, and takes blocks of more to be so long."""

    breaks = ("mla_block_sizes",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            if kv_cache.shape[1] <= 64:
                return super().attend(layer, query, kv_cache, common)
            cut = kv_cache.clone()
            cut[:, 64:] = kv_cache[:, :1]
            return super().attend(layer, query, cut, common)


class FarBlocksWrap(MLATwin):
    """Computes offsets into the cache in 32 bits, so that far blocks are near ones."""

    breaks = ("mla_far_blocks",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            if kv_cache.numel() < 2**31:
                return super().attend(layer, query, kv_cache, common)
            first = 2**31 // kv_cache.stride(0)
            table = common.block_table
            if table is not None:
                common = common.with_fields(block_table=(table - first).clamp_min(0))
            return super().attend(layer, query, kv_cache, common)


class CompanyMatters(MLATwin):
    """Sums otherwise when more requests share the batch."""

    breaks = ("mla_invariance",)

    class impl(MLAReferenceImpl):
        def attend(
            self,
            layer: AttentionLayer,
            query: Tensor,
            kv_cache: Tensor,
            common: CommonAttentionMetadata,
        ) -> ReferenceResult:
            found = super().attend(layer, query, kv_cache, common)
            return replace(found, output=found.output * (1 + 1e-6 * common.num_reqs))


TWINS: tuple[type[MLATwin], ...] = (
    ScaledByEntry,
    MissesLastKey,
    SeesLaterDrafts,
    DecodesAlwaysCausal,
    LongestQueryForAll,
    LastHeadMissing,
    RopeOfEight,
    LatentLseInBits,
    LatentScaleDropped,
    DividesByNothing,
    WeighsTailsByZero,
    DenseBlocks,
    BlocksOfAtMost64,
    FarBlocksWrap,
    CompanyMatters,
)
