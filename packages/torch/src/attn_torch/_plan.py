"""What one step's calls are: built once on the host, read by every layer of a group.

A batch becomes tiles. A `RequestTile` holds the rows of one request, whose keys are read as whole
blocks; or, where the call brings the keys, of several equal requests that lie side by side. A
`GroupTile` holds short requests of a paged batch together, padded to the longest, so that they
cost one call instead of one each. Grouping changes shapes with the company a request keeps; it is
left out where results must not depend on that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_torch._batch import HostBatch
from attn_torch._spans import LOGITS_BYTES, Chunk, Cover, Span, row_chunks, spans_of
from attn_torch._visibility import Visibility

__all__ = ["GroupLimits", "GroupTile", "Plan", "RequestTile", "Tiler"]

_GROUPED_ROWS = 8  # longest query that shares a call: decodes and their drafts
_LEAST_FILL = 0.75  # how much of a group's longest request the shortest must reach

# Bytes of gathered keys and values up to which requests share a call. On a CPU a call costs tens
# of microseconds, and padding and gathering out of cache cost more than that from 2 MiB on; on an
# accelerator a call's launches cost more than either.
_GROUP_BYTES = {"cpu": 2 * 2**20}
_GROUP_BYTES_ELSEWHERE = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestTile:
    """One request, or `count` equal ones side by side in query, key and value.

    Attributes:
        span: rows and keys of the (first) request.
        chunks: its rows as calls of a fused kernel.
        first_key: absolute position of the first key that is read.
        stop_key: position after the last.
        count: requests.
        blocks: ids of the blocks that hold the keys, a view of the table; None without a cache.
    """

    span: Span
    chunks: tuple[Chunk, ...]
    first_key: int
    stop_key: int
    count: int = 1
    blocks: Tensor | None = None

    def with_table(self, block_table: Tensor, block_size: int) -> RequestTile:
        """Return the tile over another block table."""
        used = slice(self.first_key // block_size, -(-self.stop_key // block_size))
        return replace(self, blocks=block_table[self.span.request, used])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTile:
    """R requests of n query rows each, over L keys each, padded to the longest.

    Padding repeats a request's last key, behind the mask: nothing past its end is read.

    Attributes:
        query_len: n.
        rows: the R * n query rows: a slice where they lie side by side, else int64 indices.
        query_positions: (R, n, 1) int64.
        key_positions: (R, 1, L) int64; past a request's end they go on counting.
        mask: (R, n, L) bool, None where every row sees every key.
        requests: (R, 1) int64, rows of the block table.
        columns: (R, L) int64, columns of the block table.
        offsets: (R, L) int64, the key's place inside its block.
        blocks: (R, L) int64, the key's block.
    """

    query_len: int
    rows: slice | Tensor
    query_positions: Tensor
    key_positions: Tensor
    mask: Tensor | None
    requests: Tensor
    columns: Tensor
    offsets: Tensor
    blocks: Tensor

    def with_table(self, block_table: Tensor, block_size: int) -> GroupTile:
        """Return the tile over another block table."""
        return replace(self, blocks=block_table[self.requests, self.columns].long())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The calls of one step for layers of one visibility; `blind` rows see no key."""

    tiles: tuple[RequestTile | GroupTile, ...]
    blind: tuple[slice, ...]

    def with_table(self, block_table: Tensor, block_size: int) -> Plan:
        """Return the plan over another block table."""
        tiles = tuple(tile.with_table(block_table, block_size) for tile in self.tiles)
        return replace(self, tiles=tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Most keys of all requests of a group, and most rows * keys; 0 keys: no groups."""

    max_keys: int
    max_logits: int

    @classmethod
    def of(
        cls, device: torch.device, *, key_bytes: int, num_heads: int, is_invariant: bool
    ) -> GroupLimits:
        """Return the limits on a device.

        Args:
            device: where the kernels run.
            key_bytes: bytes of one gathered key and value, all heads.
            num_heads: query heads.
            is_invariant: results must not depend on what shares the batch.
        """
        num_bytes = _GROUP_BYTES.get(device.type, _GROUP_BYTES_ELSEWHERE)
        return cls(
            max_keys=0 if is_invariant else num_bytes // key_bytes,
            max_logits=LOGITS_BYTES // (4 * num_heads),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiler:
    """Makes the plan of a batch.

    Attributes:
        visibility: of the layers.
        limits: of groups.
        device: where the kernels run.
        block_size: tokens per block; None where the call brings the keys.
    """

    visibility: Visibility
    limits: GroupLimits
    device: torch.device
    block_size: int | None

    def plan(self, batch: HostBatch, block_table: Tensor | None) -> Plan:
        """Return calls for all rows of the batch."""
        spans, blind = spans_of(
            batch.query_starts,
            batch.key_lens,
            is_causal=batch.is_causal,
            visibility=self.visibility,
            ranges=batch.ranges,
            key_starts=batch.key_starts,
        )
        if self.block_size is None or block_table is None:
            tiles: list[RequestTile | GroupTile] = list(self._side_by_side(spans))
        else:
            tiles = list(self._paged(spans, block_table, self.block_size))
        return Plan(tiles=tuple(tiles), blind=tuple(blind))

    def _paged(
        self, spans: Sequence[Span], block_table: Tensor, block_size: int
    ) -> Iterator[RequestTile | GroupTile]:
        alone = [span for span in spans if not self._may_share(span)]
        for members in self._groups(span for span in spans if self._may_share(span)):
            if len(members) > 1:
                yield self._group(members, block_table, block_size)
            else:
                alone += members
        for span in alone:
            yield self._request(span).with_table(block_table, block_size)

    def _request(self, span: Span, count: int = 1) -> RequestTile:
        chunks = row_chunks(span, self.visibility)
        return RequestTile(
            span=span,
            chunks=chunks,
            first_key=min(chunk.first_key for chunk in chunks),
            stop_key=max(chunk.stop_key for chunk in chunks),
            count=count,
        )

    def _side_by_side(self, spans: Sequence[Span]) -> Iterator[RequestTile]:
        """Join neighbours of equal lengths: the windows or images of a vision tower."""
        first, count = 0, 1
        for index in range(1, len(spans) + 1):
            follows = (
                self.limits.max_keys > 0
                and index < len(spans)
                and _continues(spans[first], count, spans[index])
                and spans[first].query_len * spans[first].key_len * (count + 1)
                <= self.limits.max_logits
            )
            if follows:
                count += 1
            else:
                yield self._request(spans[first], count)
                first, count = index, 1

    def _may_share(self, span: Span) -> bool:
        is_small = self._num_keys(span) * 2 <= self.limits.max_keys
        return is_small and span.query_len <= _GROUPED_ROWS and not span.ranges

    def _first_key(self, span: Span) -> int:
        return self.visibility.first_key(span.position)

    def _num_keys(self, span: Span) -> int:
        bottom = span.position + span.query_len - 1
        last = self.visibility.last_key(bottom, span.key_len, is_causal=span.is_causal)
        return last + 1 - self._first_key(span)

    def _groups(self, spans: Iterable[Span]) -> Iterator[list[Span]]:
        """Sort requests of one kind by length and cut where the next is too short or too much."""
        kinds: dict[tuple[int, bool], list[Span]] = defaultdict(list)
        for span in spans:
            kinds[span.query_len, span.is_causal].append(span)
        for (query_len, _), alike in kinds.items():
            members: list[Span] = []
            for span in sorted(alike, key=self._num_keys, reverse=True):
                if members and not self._fits(members, span, query_len):
                    yield members
                    members = []
                members.append(span)
            yield members

    def _fits(self, members: Sequence[Span], span: Span, query_len: int) -> bool:
        longest = self._num_keys(members[0])
        num_keys = longest * (len(members) + 1)
        return (
            self._num_keys(span) >= _LEAST_FILL * longest
            and num_keys <= self.limits.max_keys
            and num_keys * query_len <= self.limits.max_logits
        )

    def _group(self, members: list[Span], block_table: Tensor, block_size: int) -> GroupTile:
        """Lay requests of one query length out as one padded call."""
        members.sort(key=lambda span: span.query_start)
        query_len, num_keys = members[0].query_len, max(map(self._num_keys, members))
        starts = self._column(self._first_key(span) for span in members)
        stops = starts + self._column(self._num_keys(span) for span in members)
        position = self._column(span.position for span in members)
        key_positions = starts + torch.arange(num_keys, device=self.device)
        query_positions = position + torch.arange(query_len, device=self.device)
        owned = torch.minimum(key_positions, stops - 1)
        requests = self._column(span.request for span in members)
        columns = owned.div(block_size, rounding_mode="floor")
        return GroupTile(
            query_len=query_len,
            rows=self._rows(members),
            query_positions=query_positions.unsqueeze(2),
            key_positions=key_positions.unsqueeze(1),
            mask=self._mask(members, query_positions, key_positions, stops),
            requests=requests,
            columns=columns,
            offsets=owned.remainder(block_size),
            blocks=block_table[requests, columns].long(),
        )

    def _column(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64).to(self.device).unsqueeze(1)

    def _rows(self, members: Sequence[Span]) -> slice | Tensor:
        first, query_len = members[0].query_start, members[0].query_len
        starts = [span.query_start for span in members]
        if starts == list(range(first, first + query_len * len(members), query_len)):
            return slice(first, first + query_len * len(members))
        rows = self._column(starts) + torch.arange(query_len, device=self.device)
        return rows.flatten()

    def _mask(
        self, members: Sequence[Span], query: Tensor, key: Tensor, stops: Tensor
    ) -> Tensor | None:
        chunks = [row_chunks(span, self.visibility) for span in members]
        lengths = {chunk.num_keys for each in chunks for chunk in each}
        if len(lengths) == 1 and all(each[0].cover is Cover.FULL for each in chunks):
            return None
        visible = self.visibility.mask(
            query.unsqueeze(2), key.unsqueeze(1), is_causal=members[0].is_causal
        )
        return visible & (key < stops).unsqueeze(1)


def _continues(first: Span, count: int, span: Span) -> bool:
    """Whether `span` is the next of `count` requests like `first`, all of one shape."""
    return (
        span.query_len == first.query_len
        and span.key_len == first.key_len
        and span.position == first.position
        and span.query_start == first.query_start + count * first.query_len
        and span.key_start == first.key_start + count * first.key_len
    )
