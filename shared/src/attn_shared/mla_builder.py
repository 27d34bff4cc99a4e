"""The metadata builder of every MLA backend: decodes apart from prefills, and long contexts cut.

A backend subclasses it, says which query lengths its decode kernel takes, and plans the decodes in
`build_decode`; the prefills are the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar, final

import torch
from torch import Tensor

from attn_shared._mla_gather import Gathering, gathered_chunks
from attn_shared.backend import AttentionMetadataBuilder
from attn_shared.capability import Capability
from attn_shared.checked import check_metadata
from attn_shared.errors import BackendDefinitionError, MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_context import (
    context_chunks,
    context_tokens,
    cut_context,
    ragged_part,
)
from attn_shared.mla_metadata import (
    ContextChunk,
    MLAMetadata,
    MLAPrefillMetadata,
    MLAQuerySupport,
    RaggedPart,
)
from attn_shared.mla_prefill import MLAPrefill, prefill_request
from attn_shared.selector import DEFAULT_SELECTOR
from attn_shared.served import (
    request_of,
    require_batch_served,
    require_block_table,
    require_served,
)
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform

__all__ = ["MLAMetadataBuilder", "leading_part"]

D = TypeVar("D")
"""A backend's own metadata of the decodes."""

_UNBOUNDED = 2**31 - 1
_SHARED = ("num_heads", "head_size", "head_size_v", "mla", "dtype", "scale", "dcp_size")


class MLAMetadataBuilder(AttentionMetadataBuilder[MLAMetadata[D]]):
    """Splits a batch by what the decode kernel takes.

    A leading row is a decode if it has at most `reorder_batch_threshold` query tokens; with
    UNIFORM also as many as the first row, with SINGLE one. What follows the first row that is none
    is prefilled, whatever its length. Over a sharded cache every row is a decode, since no rank
    has a request's latents.

    Decodes need no host lengths, so that they can be captured; prefills need exact ones.

    Class attributes:
        backend_name: for messages.
        served: the capability that layers and batches are held against.
        query_support: which query lengths a call of `forward_mqa` takes.
        decode_threshold: most query tokens of a decode, where longer rows are faster by
            `forward_mha`; drafts of speculative decoding raise it, but with SINGLE.
        max_query_len: most query tokens that the decode kernel can take; None: any number.
    """

    backend_name: ClassVar[str]
    served: ClassVar[Capability]
    query_support: ClassVar[MLAQuerySupport] = MLAQuerySupport.SINGLE
    decode_threshold: ClassVar[int] = 1
    max_query_len: ClassVar[int | None] = None
    requires_ordered_batch = True

    def __init_subclass__(cls) -> None:
        """Refuse a threshold that the kernel's query lengths contradict.

        Raises:
            BackendDefinitionError: as said.
        """
        super().__init_subclass__()
        limit = 1 if cls.query_support is MLAQuerySupport.SINGLE else cls.max_query_len
        if limit is not None and cls.decode_threshold > limit:
            raise BackendDefinitionError(
                f"{cls.__name__}.decode_threshold={cls.decode_threshold} with query_support="
                f"{cls.query_support} and max_query_len={cls.max_query_len}; allowed: at most "
                f"{limit}."
            )

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
        self.layer = require_uniform(layers, _SHARED)
        for layer in layers.values():
            self.check_served(layer)
        self.block_size = self.shared_block_size()
        self.is_invariant = config.batch_invariant or any(
            layer.batch_invariant for layer in layers.values()
        )
        self.is_sharded = self.layer.dcp_size > 1
        self.reorder_batch_threshold = self._threshold()
        self._kernel: MLAPrefill | None = None

    def check_served(self, layer: LayerSpec) -> None:
        """Refuse a layer that is not served; a backend may refuse more."""
        require_served(self.backend_name, self.served, layer)

    @classmethod
    def most_decode_tokens(cls, *, drafts: int = 0, is_sharded: bool = False) -> int | None:
        """Return the most query tokens of a row that goes to the decode kernel; None: any number.

        Args:
            drafts: of speculative decoding in each step.
            is_sharded: no rank has a request's latents.
        """
        if cls.query_support is MLAQuerySupport.SINGLE:
            return 1
        if is_sharded:
            return cls.max_query_len
        most = max(cls.decode_threshold, 1 + drafts)
        return most if cls.max_query_len is None else min(cls.max_query_len, most)

    @property
    def most_drafts(self) -> int:
        """Draft tokens that a request may have in a step."""
        return self.config.num_spec_tokens * (2 if self.config.parallel_drafting else 1)

    def _threshold(self) -> int:
        most = self.most_decode_tokens(drafts=self.most_drafts, is_sharded=self.is_sharded)
        return _UNBOUNDED if most is None else most

    @abstractmethod
    def build_decode(self, common: CommonAttentionMetadata) -> D:
        """Return the backend's metadata of the decodes.

        With SINGLE and UNIFORM every row has `common.max_query_len` query tokens, so that query
        rows may be viewed as (B, max_query_len, H, latent_size). With VARLEN a row may have none.
        A row of seq_len 0 is padding. Tensors are those of the batch or views of their first
        rows, so that a captured step finds the contents of later ones there.

        Args:
            common: the decodes alone, at least one token.
        """

    @final
    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata[D]:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens of a shared prefix, checked and otherwise without effect.
            common: the batch, decodes first.
            fast_build: without effect: there is one schedule.

        Raises:
            MetadataError: prefills without exact host lengths, a decode behind a longer row, or
                lengths that contradict each other.
            UnsupportedOptionError: the batch asks for what the capability does not name, or its
                rows are longer than the decode kernel takes and the cache is sharded.
        """
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
        require_batch_served(self.backend_name, self.served, self.layer, common, common_prefix_len)
        query_lens = common.query_lens_cpu.tolist()
        num_decodes = self._num_decodes(query_lens)
        num_decode_tokens = sum(query_lens[:num_decodes])
        has_prefills = num_decode_tokens < common.num_actual_tokens
        if has_prefills:
            self._refuse_long_shards(query_lens[num_decodes:])
            self._refuse_late_decodes(common, query_lens, num_decodes)
        decodes = leading_part(common, query_lens, num_decodes) if num_decode_tokens else None
        return MLAMetadata(
            num_tokens=common.num_actual_tokens,
            num_decode_tokens=num_decode_tokens,
            num_decodes=num_decodes,
            decode=None if decodes is None else self.build_decode(decodes),
            prefill=self._prefill(common, num_decodes) if has_prefills else None,
        )

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> MLAMetadata[D]:
        """Return metadata to capture with.

        Raises:
            UnsupportedOptionError: the batch has prefills, whose calls depend on their lengths.
        """
        longest = max(common.query_lens_cpu.tolist(), default=0)
        if self._num_decodes(common.query_lens_cpu.tolist()) < common.num_reqs:
            raise UnsupportedOptionError(
                f"a captured batch has query lengths up to {longest} that are no decodes of "
                f"{self.backend_name}; allowed: at most {self.reorder_batch_threshold}, "
                f"{self.query_support}.",
                hint="capture decodes alone, and run prefills without a graph.",
            )
        return self.build(0, common)

    def _num_decodes(self, query_lens: Sequence[int]) -> int:
        """Return how many leading rows are decodes; none without a token ends them."""
        threshold = self.reorder_batch_threshold or 1
        first = query_lens[0] if query_lens else 0
        is_varlen = self.query_support is MLAQuerySupport.VARLEN
        count = 0
        for length in query_lens:
            if length > threshold or (not is_varlen and (length != first or length == 0)):
                break
            count += 1
        while count and query_lens[count - 1] == 0:
            count -= 1
        return count

    def _refuse_long_shards(self, query_lens: Sequence[int]) -> None:
        """Refuse rows that the decode kernel cannot take where no other can."""
        if not self.is_sharded:
            return
        raise UnsupportedOptionError(
            f"{self.backend_name} has rows of {max(query_lens)} query tokens over a cache that is "
            f"sharded (dcp_size={self.layer.dcp_size}); allowed: {self.query_support}, at most "
            f"{self.reorder_batch_threshold}.",
            hint="a rank has not the latents that expanded heads would read.",
        )

    def _refuse_late_decodes(
        self, common: CommonAttentionMetadata, query_lens: Sequence[int], num_decodes: int
    ) -> None:
        """Refuse a decode behind a longer row: nobody ran `reorder`, and it would be expanded.

        A row without earlier keys, or one that still reads its prompt, is prefilled as well as
        any; where lengths differ in a kernel that takes one, the later ones are too.
        """
        if common.seq_lens_cpu is None:
            return  # prefills need them, and say so
        seq_lens = common.seq_lens_cpu.tolist()
        threshold = self.reorder_batch_threshold or 1
        is_reading = None if common.is_prefilling is None else common.is_prefilling.tolist()
        seen_longer = False
        for row in range(num_decodes, common.num_reqs):
            length, total = query_lens[row], seq_lens[row]
            seen_longer = seen_longer or length > threshold
            is_decode = 0 < length <= threshold and total > length
            if seen_longer and is_decode and not (is_reading is not None and is_reading[row]):
                raise MetadataError.for_argument(
                    f"query_start_loc row {row}",
                    f"of {length} query tokens, out of order",
                    f"decodes (up to {threshold} tokens) before all else",
                    hint="the engine reorders a batch (attn_shared.batching.reorder) before it "
                    "is described.",
                )

    # Prefills

    @property
    def prefill_kernel(self) -> MLAPrefill:
        """What prefills: the configured class, or the one selected for the device."""
        if self._kernel is None:
            cls = self.config.mla_prefill
            if cls is None:
                facts = DEFAULT_SELECTOR.device_facts(self.device)
                asked = prefill_request(request_of(self.layer))
                cls = DEFAULT_SELECTOR.resolve(asked, facts, kind="mla_prefill").prefill_cls
            self._kernel = cls(self.layer, self.config, self.device)
        return self._kernel

    def build_gathered(
        self, common: CommonAttentionMetadata, first: int, gathering: Gathering
    ) -> MLAMetadata[D]:
        """Return metadata of prefills alone, over a cache whose entries ranks gather.

        Args:
            common: the batch, whole sequences and this rank's block table.
            first: the request from which on rows are prefilled.
            gathering: who shares the cache.

        Raises:
            MetadataError: host lengths are missing or not exact, or the table is too short.
        """
        num_decode_tokens = int(common.query_start_loc_cpu[first])
        return MLAMetadata(
            num_tokens=common.num_actual_tokens,
            num_decode_tokens=num_decode_tokens,
            num_decodes=first,
            decode=None,
            prefill=self._prefill(common, first, gathering),
        )

    def _prefill(
        self, common: CommonAttentionMetadata, first: int, gathering: Gathering | None = None
    ) -> MLAPrefillMetadata:
        """Describe the rows from request `first` on."""
        is_causal = common.causal
        if not isinstance(is_causal, bool):
            raise UnsupportedOptionError(
                "a causal tensor is not served in prefills over latents; allowed: True or False."
            )
        starts = common.query_start_loc_cpu[first:]
        starts = starts - starts[0]
        query_lens = starts.diff().tolist()
        seq_lens = common.exact_seq_lens_cpu[first:].tolist()
        new = ragged_part(starts, starts, self.device, is_causal=is_causal)
        rows = [slice(*pair) for pair in zip(starts.tolist(), starts[1:].tolist(), strict=False)]
        return MLAPrefillMetadata(
            kernel=self.prefill_kernel,
            new=self._prepared(new),
            context=self._context(common, first, starts, _earlier(query_lens, seq_lens), gathering),
            blind=tuple(
                own
                for own, length in zip(rows, seq_lens, strict=True)
                if length == 0 and own.stop > own.start
            ),
        )

    def _context(
        self,
        common: CommonAttentionMetadata,
        first: int,
        starts: Tensor,
        lens: Sequence[int],
        gathering: Gathering | None,
    ) -> tuple[ContextChunk, ...]:
        """Cut the earlier keys of prefills into chunks that fit the workspace."""
        if not any(lens):
            return ()
        table = require_block_table(common)[first:]
        reach = table.shape[1] * self.block_size
        if gathering is None and max(lens) > reach:
            raise MetadataError.for_argument(
                "earlier keys of a request", max(lens), f"at most {reach}, what block_table has"
            )
        most = context_tokens(self.layer, self.config.mla_workspace_bytes, self.block_size)
        pieces = cut_context(lens, most, is_invariant=self.is_invariant)
        if gathering is None:
            chunks = context_chunks(pieces, starts, table, self.block_size)
        else:
            chunks = gathered_chunks(pieces, starts, table, gathering)
        return tuple(replace(chunk, part=self._prepared(chunk.part)) for chunk in chunks)

    def _prepared(self, part: RaggedPart) -> RaggedPart:
        return replace(part, plan=self.prefill_kernel.prepare(part))


def _earlier(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[int]:
    """Return the keys of earlier steps of each request; none where no row reads them."""
    return [
        max(0, total - length) if length and total else 0
        for length, total in zip(query_lens, seq_lens, strict=True)
    ]


def leading_part(
    common: CommonAttentionMetadata, query_lens: Sequence[int], num_decodes: int
) -> CommonAttentionMetadata:
    """Return the first requests of a batch, by views of its tensors.

    Args:
        common: the batch.
        query_lens: of all requests.
        num_decodes: how many are wanted, at least one.
    """
    if num_decodes == common.num_reqs:
        return common
    lens = query_lens[:num_decodes]
    part = common.unpadded(sum(lens), num_decodes)
    longest = common.max_seq_len
    if part.seq_lens_cpu is not None:
        longest = min(longest, int(part.seq_lens_cpu.max()))
    return part.with_fields(max_query_len=max(lens), max_seq_len=longest)
