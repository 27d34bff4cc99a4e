"""Prefill context parallelism of a layer: tokens split over ranks, keys and values gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attn_shared.context_parallel import single_collective
from attn_shared.errors import InvalidInputError, MetadataError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.prefill_split import PrefillSplit, split_batch
from attn_shared.ranks import ContextParallel, compare_ranks

__all__ = ["PcpGroup"]


@dataclass(slots=True, kw_only=True, eq=False)
class PcpGroup:
    """The ranks that split a step's tokens.

    Attributes:
        place: of this rank.
        facts: of the layer, on which all ranks must agree.
        is_checked: compare the ranks' batches at every step.
    """

    place: ContextParallel
    facts: Mapping[str, object]
    is_checked: bool
    _group: Any = field(init=False)
    _was_compared: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Agree with the other ranks.

        Raises:
            RanksDisagreeError: another rank built another layer.
        """
        self._group = self.place.pcp_group
        compare_ranks(self._group, "the layer", self.facts)

    def split(self, common: CommonAttentionMetadata) -> PrefillSplit:
        """Return this rank's part of a batch.

        Raises:
            MetadataError: the batch does not say where its tokens are stored.
            RanksDisagreeError: another rank has another batch; looked at in the first step and, in
                checked mode, in every one.
        """
        if common.slot_mapping is None:
            raise MetadataError.for_argument(
                "slot_mapping", None, "(T,) int64 of the whole batch with pcp_size > 1"
            )
        if self.is_checked or not self._was_compared:
            lens = common.seq_lens_cpu if common.seq_lens_cpu_is_exact else None
            facts = {"query_start_loc": common.query_start_loc_cpu, "seq_lens": lens}
            compare_ranks(self._group, "the batch", facts)
            self._was_compared = True
        return split_batch(common, self.place.pcp_size, self.place.pcp_rank)

    def gather(self, key: Tensor, value: Tensor, split: PrefillSplit) -> tuple[Tensor, Tensor]:
        """Return keys (T, Hkv, D) and values (T, Hkv, Dv) of the whole batch, from each rank's own.

        Raises:
            InvalidInputError: they are not one row for each token of this rank.
        """
        rows = len(split.rows)
        for name, own in (("key", key), ("value", value)):
            if own.ndim != 3 or len(own) < rows:
                raise InvalidInputError.for_argument(
                    f"{name} shape", tuple(own.shape), f"({rows}, Hkv, D), this rank's tokens"
                )
        width = key.shape[-1]
        sent = key.new_zeros((split.most, key.shape[1], width + value.shape[-1]))
        sent[:rows, :, :width] = key[:rows]
        sent[:rows, :, width:] = value[:rows]
        every = sent.new_empty((self.place.pcp_size * split.most, *sent.shape[1:]))
        single_collective("all_gather_single", "all_gather_into_tensor")(
            every, sent, group=self._group
        )
        whole = every[split.order]
        return whole[..., :width], whole[..., width:]
