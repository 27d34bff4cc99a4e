"""Block tables of a batch over one pool of blocks, which rows may share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_shared.errors import InvalidInputError

__all__ = ["BlockPool", "BlockTables", "Copies"]

Copies = list[tuple[int, int]]
"""(from, to): blocks whose contents a row needs for itself before it writes."""

_FIRST_BLOCKS = 16


class BlockPool:
    """Ids of blocks: which are free, and how many rows hold each of the others.

    Attributes:
        capacity: blocks that exist.
        limit: most blocks that may exist; None: as many as it takes.
        peak_used: most blocks that were held at one time.
        num_touched: blocks 0 to num_touched - 1 have been held at some time, no others.
        reused: blocks taken that had been held before, with what their holder left there; whoever
            zeroes them empties the list.
    """

    def __init__(self, limit: int | None = None, *, first_blocks: int = _FIRST_BLOCKS) -> None:
        """Start with no block.

        Args:
            limit: most blocks that may exist; None: as many as it takes.
            first_blocks: blocks to begin with, when the first is taken.

        Raises:
            InvalidInputError: a limit below one block.
        """
        if limit is not None and limit < 1:
            raise InvalidInputError.for_argument("max_blocks", limit, "an integer >= 1, or None")
        self.capacity = 0
        self.limit = limit
        self.peak_used = 0
        self.num_touched = 0
        self.reused: list[int] = []
        self._first_blocks = first_blocks
        self._free: list[int] = []
        self._holders: list[int] = []

    @property
    def num_used(self) -> int:
        """Blocks that a row holds."""
        return self.capacity - len(self._free)

    def take(self) -> int:
        """Return a block that one row holds from now on; the pool grows if none is free.

        Raises:
            InvalidInputError: the limit is reached.
        """
        if not self._free:
            self._grow()
        block = self._free.pop()
        self._holders[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        if block < self.num_touched:
            self.reused.append(block)
        self.num_touched = max(self.num_touched, block + 1)
        return block

    def share(self, block: int) -> None:
        """Count one more row that holds a block."""
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Count one row less; the last one frees the block."""
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether more than one row holds the block."""
        return self._holders[block] > 1

    def _grow(self) -> None:
        capacity = max(self._first_blocks, self.capacity * 3 // 2)
        if self.limit is not None:
            capacity = min(capacity, self.limit)
        if capacity == self.capacity:
            raise InvalidInputError.for_argument(
                "blocks needed",
                f"more than {self.capacity}",
                f"at most max_blocks={self.limit}, all of which are in use",
                hint="give PagedCache more blocks, or generate less at a time.",
            )
        self._free += range(capacity - 1, self.capacity - 1, -1)  # the lowest is taken first
        self._holders += [0] * (capacity - self.capacity)
        self.capacity = capacity


class BlockTables:
    """Blocks and lengths of each row of a batch.

    Rows may share blocks that are full: only what is written must be a row's own.

    Attributes:
        lengths: (B,) tokens of each row.
    """

    def __init__(self, batch_size: int, block_size: int, pool: BlockPool) -> None:
        """Start with empty rows."""
        self.lengths = [0] * batch_size
        self._block_size = block_size
        self._pool = pool
        self._rows: list[list[int]] = [[] for _ in range(batch_size)]
        self._num_left: list[int] = [0] * batch_size  # leading entries that were given back

    def __len__(self) -> int:
        """Return the rows (B)."""
        return len(self.lengths)

    def append(self, counts: Sequence[int]) -> None:
        """Lengthen each row by a number of tokens, taking blocks where needed.

        Raises:
            InvalidInputError: the pool's limit is reached; then nothing has changed.
        """
        needed = [self._num_blocks(n + c) for n, c in zip(self.lengths, counts, strict=True)]
        taken: list[int] = []
        try:
            for row, count in zip(self._rows, needed, strict=True):
                for _ in range(count - len(row)):
                    taken.append(self._pool.take())
        except InvalidInputError:
            for block in taken:
                self._pool.release(block)
            raise
        fresh = iter(taken)
        for row, count in zip(self._rows, needed, strict=True):
            row.extend(next(fresh) for _ in range(count - len(row)))
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    def leave(self, first_needed: Sequence[int]) -> None:
        """Give back the blocks that lie wholly before a position of each row.

        Their entries stay in the table, as 0: kernels never look at what is left of a window, but
        want an id that exists.

        Args:
            first_needed: (B,) the leftmost position that any later query sees.
        """
        for index, position in enumerate(first_needed):
            row = self._rows[index]
            for entry in range(self._num_left[index], max(0, position) // self._block_size):
                self._pool.release(row[entry])
                row[entry] = 0
                self._num_left[index] = entry + 1

    def can_shorten(self, counts: Sequence[int], reach: int | None) -> bool:
        """Whether rows have what their windows show after losing `counts` tokens at the end.

        Args:
            counts: (B,) tokens to lose.
            reach: keys that a window shows to the left; None: all.
        """
        kept = (n * self._block_size for n in self._num_left)
        after = (n - c for n, c in zip(self.lengths, counts, strict=True))
        return all(
            start == 0 or (reach is not None and start <= length - reach)
            for start, length in zip(kept, after, strict=True)
        )

    def shorten(self, counts: Sequence[int]) -> Copies:
        """Take a number of tokens off the end of each row; returns copies to make."""
        self.lengths = [n - c for n, c in zip(self.lengths, counts, strict=True)]
        for index, row in enumerate(self._rows):
            keep = self._num_blocks(self.lengths[index])
            for block in row[max(keep, self._num_left[index]) :]:
                self._pool.release(block)
            del row[keep:]
            self._num_left[index] = min(self._num_left[index], keep)
        return self._own_ends()

    def select(self, rows: Sequence[int]) -> Copies:
        """Make row i what row rows[i] was, sharing its full blocks; returns copies to make."""
        old, left = self._rows, self._num_left
        self._rows = [list(old[row]) for row in rows]
        self._num_left = [left[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        for block in self._held(self._rows, self._num_left):
            self._pool.share(block)
        for block in self._held(old, left):
            self._pool.release(block)
        return self._own_ends()

    def clear(self) -> None:
        """Give every block back."""
        for block in self._held(self._rows, self._num_left):
            self._pool.release(block)
        self._rows = [[] for _ in self._rows]
        self._num_left = [0] * len(self._rows)
        self.lengths = [0] * len(self._rows)

    def tensor(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the table of some rows, (len(rows), M) int32 on the host; short rows end in 0."""
        width = max((len(self._rows[row]) for row in rows), default=0)
        padded = [self._rows[row] + [0] * (width - len(self._rows[row])) for row in rows]
        return torch.tensor(padded, dtype=torch.int32).view(len(rows), width)

    def open_ends(self) -> list[tuple[int, int]]:
        """Return (block, tokens in it) of each row whose last block is not full."""
        counts = [length % self._block_size for length in self.lengths]
        return [(row[-1], count) for row, count in zip(self._rows, counts, strict=True) if count]

    def slots(self, row: int, start: int, stop: int) -> list[int]:
        """Return where the tokens of a row at positions start to stop lie, one by one."""
        blocks, size = self._rows[row], self._block_size
        return [blocks[at // size] * size + at % size for at in range(start, stop)]

    def _own_ends(self) -> Copies:
        """Give each row a last block of its own where it will write into one that others hold."""
        copies: Copies = []
        for index, length in enumerate(self.lengths):
            row = self._rows[index]
            if length % self._block_size and self._pool.is_shared(row[-1]):
                own = self._pool.take()
                copies.append((row[-1], own))
                self._pool.release(row[-1])
                row[-1] = own
        return copies

    @staticmethod
    def _held(rows: Sequence[Sequence[int]], num_left: Sequence[int]) -> list[int]:
        pairs = zip(rows, num_left, strict=True)
        return [block for row, start in pairs for block in row[start:]]

    def _num_blocks(self, length: int) -> int:
        return -(-length // self._block_size)
