"""Latent attention over ranks: short rows decode over shards, long ones gather earlier entries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from attn_shared._mla_gather import Gathering
from attn_shared._ranks_layer import RanksLayer, RanksStep
from attn_shared.backend import AttentionMetadataBuilder, MLAAttentionImpl
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_builder import MLAMetadataBuilder, leading_part
from attn_shared.ordering import ordered
from attn_shared.ranks import compare_ranks
from attn_shared.request import AttentionRequest
from attn_shared.selection import Selection

__all__ = ["GatheredPrefills", "may_gather"]


def may_gather(request: AttentionRequest, selection: Selection) -> bool:
    """Whether prefills of a layer with its weight gather a sharded cache's entries."""
    builder = selection.backend_cls.get_builder_cls()
    return request.dcp_size > 1 and issubclass(builder, MLAMetadataBuilder)


class GatheredPrefills:
    """Splits a rank's steps by query length.

    Args:
        ranks: the layer's side that decodes, and that writes the cache.
        impl: of this rank's own heads.
        builder: likewise.

    Attributes:
        impl: of this rank's own heads.
    """

    def __init__(
        self,
        ranks: RanksLayer,
        impl: MLAAttentionImpl[Any],
        builder: AttentionMetadataBuilder[Any],
    ) -> None:
        """Agree with the other ranks on what decides how often they meet.

        Raises:
            RanksDisagreeError: another rank cuts its batches or its keys otherwise.
        """
        if not isinstance(builder, MLAMetadataBuilder):
            raise TypeError(f"{type(builder).__name__} plans no prefills over latents")
        self.impl = impl
        self._ranks, self._builder = ranks, builder
        self._gathering = Gathering(shard=ranks.shard, group=ranks.group)
        drafts = builder.most_drafts
        most = builder.most_decode_tokens(drafts=drafts)
        self._most = 2**31 - 1 if most is None else most
        facts = {
            "most query tokens of a decode": self._most,
            "mla_workspace_bytes": builder.config.mla_workspace_bytes,
            "mla": builder.layer.mla,
        }
        compare_ranks(ranks.group, "the prefills", facts)

    def plan(self, common: CommonAttentionMetadata) -> tuple[RanksStep, Tensor | None]:
        """Prepare one step: its decodes as those of any sharded layer, its prefills by gathering.

        Returns:
            The step, of the batch with its decodes first, and where its rows are in the given one;
            None where nothing moved.

        Raises:
            MetadataError: with prefills, host lengths that are missing or not exact.
            RanksDisagreeError: another rank has another batch.
        """
        if common.max_query_len <= self._most:
            return self._ranks.plan(common), None
        self._ranks.check_batch(common)
        batch, order = ordered(common, self._most)
        query_lens = batch.query_lens_cpu.tolist()
        first = next(
            (row for row, length in enumerate(query_lens) if length > self._most), len(query_lens)
        )
        gathered = self._builder.build_gathered(batch, first, self._gathering)
        step = RanksStep(
            whole=batch,
            common=batch.unpadded(0, 0),
            split=None,
            sharded=None,
            metadata=None,
            token_order=None,
        )
        if gathered.num_decode_tokens:
            step = self._ranks.plan(leading_part(batch, query_lens, first))
        return replace(step, whole=batch, gathered=gathered), order
