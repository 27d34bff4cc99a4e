"""A batch whose tensors never move: what a captured graph reads, refreshed for each step.

A graph replays addresses, shapes and host numbers. So a graph for N requests reads one set of
tensors of that size; a step with fewer requests fills the rest with padding, which the contract
lets every backend ignore: `seq_len` 0, slots of -1, no block that is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from attn_shared._fields import require_positive
from attn_shared.errors import InvalidInputError, MetadataError
from attn_shared.kv_write import slot_mapping_for
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["StaticBatch", "padded_size"]


def padded_size(num_reqs: int, sizes: Iterable[int]) -> int:
    """Return the smallest of the captured sizes that holds so many requests.

    Raises:
        InvalidInputError: none of them does.
    """
    known = sorted(sizes)
    for size in known:
        if num_reqs <= size:
            return size
    raise InvalidInputError.for_argument(
        "num_reqs",
        num_reqs,
        f"at most {known[-1] if known else 0}, the largest captured size",
        hint="run larger batches without a graph, or capture for them too.",
    )


class StaticBatch:
    """Tensors of a uniform batch at fixed addresses.

    Attributes:
        num_reqs: requests, padding included.
        query_len: query tokens of each request, padding included.
        max_seq_len: the longest sequence that any step may bring.
    """

    def __init__(
        self,
        *,
        num_reqs: int,
        max_seq_len: int,
        block_size: int,
        query_len: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the tensors.

        Args:
            num_reqs: requests, padding included.
            max_seq_len: the longest sequence that any step may bring.
            block_size: tokens per block.
            query_len: query tokens of each request.
            device: where the kernels run.
        """
        for name, value in (
            ("num_reqs", num_reqs),
            ("max_seq_len", max_seq_len),
            ("block_size", block_size),
            ("query_len", query_len),
        ):
            require_positive(name, value)
        self.num_reqs, self.query_len, self.max_seq_len = num_reqs, query_len, max_seq_len
        self._block_size = block_size
        num_blocks = -(-max_seq_len // block_size)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32) * query_len
        self._starts_cpu, self._starts = starts, starts.to(device)
        self._seq_lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        self._table = torch.zeros(num_reqs, num_blocks, dtype=torch.int32, device=device)
        self._slots = torch.full((self.num_tokens,), -1, dtype=torch.int64, device=device)

    @property
    def num_tokens(self) -> int:
        """Query tokens, padding included."""
        return self.num_reqs * self.query_len

    def for_capture(self) -> CommonAttentionMetadata:
        """Return the batch to capture with: all padding, bounds as wide as any step's.

        Nothing is read or written while it runs for the first time, whatever the cache holds.
        """
        self.update((), torch.empty(0, 0, dtype=torch.int32))
        return self._common(torch.zeros(self.num_reqs, dtype=torch.int32), self.max_seq_len)

    def update(self, seq_lens: Sequence[int], block_table: torch.Tensor) -> CommonAttentionMetadata:
        """Write a step into the tensors; the rest of them becomes padding.

        Nothing waits for the device.

        Args:
            seq_lens: keys of each request, this step's `query_len` included.
            block_table: (requests, M) int32 on the host.

        Raises:
            MetadataError: there are more requests than rows, a sequence is too short or too long
                for the batch or its row of the table, or the table is not on the host.
        """
        self._check(seq_lens, block_table)
        lens = torch.zeros(self.num_reqs, dtype=torch.int32)
        lens[: len(seq_lens)] = torch.tensor(seq_lens, dtype=torch.int32)
        table = torch.zeros(self._table.shape, dtype=torch.int32)
        width = min(block_table.shape[1], table.shape[1])
        table[: len(seq_lens), :width] = block_table[:, :width]
        slots = slot_mapping_for(table, self._starts_cpu, lens, self._block_size)
        for target, source in (
            (self._seq_lens, lens),
            (self._table, table),
            (self._slots, slots),
        ):
            target.copy_(source, non_blocking=True)
        return self._common(lens, max(seq_lens, default=0))

    def _common(self, lens: torch.Tensor, max_seq_len: int) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            query_start_loc=self._starts,
            query_start_loc_cpu=self._starts_cpu,
            seq_lens=self._seq_lens,
            seq_lens_cpu=lens,
            num_reqs=self.num_reqs,
            num_actual_tokens=self.num_tokens,
            max_query_len=self.query_len,
            max_seq_len=max_seq_len,
            block_table=self._table,
            slot_mapping=self._slots,
            block_size=self._block_size,
        )

    def _check(self, seq_lens: Sequence[int], block_table: torch.Tensor) -> None:
        if len(seq_lens) > self.num_reqs:
            raise MetadataError.for_argument(
                "seq_lens length", len(seq_lens), f"at most {self.num_reqs}, the batch's rows"
            )
        if block_table.device.type != "cpu":
            raise MetadataError.for_argument("block_table device", block_table.device, "cpu")
        if block_table.ndim != 2 or len(block_table) != len(seq_lens):
            raise MetadataError.for_argument(
                "block_table shape", tuple(block_table.shape), f"({len(seq_lens)}, any)"
            )
        most = min(self.max_seq_len, block_table.shape[1] * self._block_size)
        for index, length in enumerate(seq_lens):
            if not self.query_len <= length <= most:
                raise MetadataError.for_argument(
                    f"seq_lens[{index}]",
                    length,
                    f"{self.query_len} (the query length) to {most} (the longest that the batch "
                    "was made for, and that the table's row holds)",
                )
