"""Twins that look for keys and values in the wrong place of a cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_conformance.reference_backend import ReferenceBuilder, ReferenceCall, ReferenceImpl
from attn_conformance.reference_backend import ReferenceMetadata as Metadata
from attn_conformance.twins.by_request import ByRequest, OneRequest
from attn_conformance.twins.twin import Twin
from attn_shared.dtypes import KVCacheLayout
from attn_shared.kv_cache import AttentionSpec, KVViews
from attn_shared.reference import ReferenceResult

__all__ = ["TWINS"]


class BlockZeroUnused(Twin):
    """Takes block 0 for the one that nobody uses, and reads zeros there."""

    breaks = ("block_zero",)

    class impl(ReferenceImpl):
        def views(self, call: ReferenceCall) -> KVViews:
            views = super().views(call)
            key, value = views.key.clone(), views.value.clone()
            key[0] = value[0] = 0
            return views._replace(key=key, value=value)


class _OtherSpec(ReferenceImpl):
    """Reads the cache by a spec of its own."""

    def other(self, spec: AttentionSpec) -> AttentionSpec:
        raise NotImplementedError

    def views(self, call: ReferenceCall) -> KVViews:
        right, spec, kv_cache = super().views(call), self.spec.kv_cache_spec, call.kv_cache
        if kv_cache is None or not isinstance(spec, AttentionSpec):
            return right
        other, count = self.other(spec), len(kv_cache)
        return other.split(kv_cache.as_strided(other.shape(count), other.strides(count)))


class BlocksWithoutPadding(Twin):
    """Takes the bytes of a block for the distance to the next."""

    breaks = ("padded_blocks",)

    class impl(_OtherSpec):
        def other(self, spec: AttentionSpec) -> AttentionSpec:
            return replace(spec, page_size_padded=None)


class AlwaysTokenMajor(Twin):
    """Reads every cache as if it lay token by token."""

    breaks = ("layouts",)

    class impl(_OtherSpec):
        def other(self, spec: AttentionSpec) -> AttentionSpec:
            return replace(spec, layout=KVCacheLayout.NHD)


class UniqueBlocks(Twin):
    """Turns the table around, block to place, so that a repeated block is seen once."""

    breaks = ("page_tables",)

    class impl(ByRequest):
        def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
            slots = self.slots(call, request)
            last = {slot: index for index, slot in enumerate(slots.tolist())}
            kept = torch.tensor(sorted(last.values()), dtype=torch.long)
            # Keys that are gone count no longer: the rows stay behind those that are left.
            positions = torch.arange(len(kept) - request.query_len, len(kept))
            return self.attend_to(call, request, slots[kept], positions)


class OwnedBlocks(Twin):
    """Turns all rows around at once: of two that share a block, the first one sees nothing."""

    breaks = ("page_tables",)

    class impl(ReferenceImpl):
        def attend_paged(self, call: ReferenceCall) -> ReferenceResult:
            result, common = super().attend_paged(call), call.common
            if common.block_table is None:
                return result
            size = self.views(call).key.shape[1]
            starts = common.query_start_loc.tolist()
            owners: dict[int, int] = {}
            for index, length in enumerate(common.seq_lens.tolist()):
                for block in common.block_table[index, : -(-length // size)].tolist():
                    if owners.setdefault(block, index) != index:
                        result.output[starts[owners[block]] : starts[owners[block] + 1]] = 0
            return result


class SortedBlocks(Twin):
    """Reads a row's blocks in the order of their numbers."""

    breaks = ("page_tables",)

    class impl(ByRequest):
        def slots(self, call: ReferenceCall, request: OneRequest) -> Tensor:
            return super().slots(call, replace(request, row=request.blocks.sort().values))


class ConsecutiveBlocks(Twin):
    """Takes a row's blocks to follow its first, as a cache without a table has them."""

    breaks = ("page_tables", "generated")

    class impl(ByRequest):
        def slots(self, call: ReferenceCall, request: OneRequest) -> Tensor:
            count = len(request.blocks)
            row = request.row[:1] + torch.arange(count)
            row = row % len(self.views(call).key)
            return super().slots(call, replace(request, row=row))


class SkipsRepeatedBlocks(Twin):
    """Takes an entry that repeats the one before for padding, and skips it."""

    breaks = ("freed_blocks", "page_tables")

    class impl(ByRequest):
        def slots(self, call: ReferenceCall, request: OneRequest) -> Tensor:
            blocks = request.blocks
            if len(blocks) > 1:
                blocks = torch.unique_consecutive(blocks)
            row = torch.cat([blocks, blocks[-1:].expand(len(request.blocks) - len(blocks))])
            return super().slots(call, replace(request, row=row))


class WholeBlocksOnly(Twin):
    """Leaves out a last block that is not full."""

    breaks = ("block_sizes", "generated")

    class impl(ByRequest):
        def slots(self, call: ReferenceCall, request: OneRequest) -> Tensor:
            size = request.block_size
            return super().slots(call, request)[: request.length // size * size]


class ShiftForDivision(Twin):
    """Finds block and offset by a shift, as if every block size were a power of two."""

    breaks = ("block_sizes",)

    class impl(ByRequest):
        def slots(self, call: ReferenceCall, request: OneRequest) -> Tensor:
            size = 1 << (request.block_size.bit_length() - 1)
            index = torch.arange(request.length)
            column = (index // size).clamp(max=max(0, len(request.blocks) - 1))
            return request.blocks[column] * request.block_size + index % size


class BlocksUpTo128(Twin):
    """Sees the first 128 tokens of a block, the keys of one tile."""

    breaks = ("block_sizes",)

    class impl(ByRequest):
        def slots(self, call: ReferenceCall, request: OneRequest) -> Tensor:
            index = torch.arange(request.length)
            offset = (index % request.block_size).clamp(max=127)
            return request.blocks[index // request.block_size] * request.block_size + offset


class NarrowOffsets(Twin):
    """Keeps offsets into the cache in 32 bits of bytes, where 2**32 is 0 again."""

    breaks = ("far_blocks",)

    class impl(ReferenceImpl):
        def views(self, call: ReferenceCall) -> KVViews:
            views = super().views(call)
            key, value = (_wrapped(view, call.common.block_table) for view in views[:2])
            return views._replace(key=key, value=value)


def _wrapped(view: Tensor, table: Tensor | None) -> Tensor:
    """Return blocks as they are found by a byte offset of 32 bits."""
    if table is None:
        return view
    found = torch.empty(view.shape, dtype=view.dtype)  # memory that is not touched costs nothing
    ids = table[(table >= 0) & (table < len(view))].unique().tolist()
    size = view.element_size()
    for block in ids:
        offset = block * view.stride(0) * size % 2**32 // size + view.storage_offset()
        found[block] = view.as_strided(view.shape[1:], view.stride()[1:], offset)
    return found


class KeepsFirstTable(Twin):
    """Returns the metadata as it was when asked to move it to another table."""

    breaks = ("update_block_table",)

    class builder(ReferenceBuilder):
        def update_block_table(
            self, metadata: Metadata, block_table: Tensor, slot_mapping: Tensor
        ) -> Metadata:
            return metadata


TWINS: tuple[type[Twin], ...] = (
    BlockZeroUnused,
    BlocksWithoutPadding,
    AlwaysTokenMajor,
    UniqueBlocks,
    OwnedBlocks,
    SortedBlocks,
    ConsecutiveBlocks,
    SkipsRepeatedBlocks,
    WholeBlocksOnly,
    ShiftForDivision,
    BlocksUpTo128,
    NarrowOffsets,
    KeepsFirstTable,
)
