"""From rows of equal length with padding, which models hold, to requests, which kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_shared.errors import UnsupportedOptionError
from attn_shared.request import Window

__all__ = ["Requests", "Tokens", "has_gap", "is_binding", "refuse_gap"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """Chosen places among B rows of `width` each.

    Attributes:
        batch_size: rows (B).
        width: places per row.
        places: (N,) int64 on the device, row * width + column of each; None: all, in order.
    """

    batch_size: int
    width: int
    places: torch.Tensor | None = None

    @classmethod
    def where(cls, is_chosen: torch.Tensor, device: torch.device) -> Tokens:
        """Return the places where a (B, width) bool tensor on the host is True."""
        batch_size, width = is_chosen.shape
        if bool(is_chosen.all()):
            return cls(batch_size=batch_size, width=width)
        places = is_chosen.flatten().nonzero().squeeze(1).to(device)
        return cls(batch_size=batch_size, width=width, places=places)

    @property
    def is_one_each(self) -> bool:
        """Whether every row has one place, and it is chosen."""
        return self.width == 1 and self.places is None

    @property
    def count(self) -> int:
        """How many are chosen (N)."""
        return self.batch_size * self.width if self.places is None else len(self.places)

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Return the chosen places (N, H, D) of states (B, H, at least width, D)."""
        if self.batch_size == 1 and self.places is None and states.shape[2] == self.width:
            return states.squeeze(0).transpose(0, 1)
        flat = states[:, :, : self.width].transpose(1, 2).flatten(0, 1)
        return flat if self.places is None else flat[self.places]

    def scatter(self, output: torch.Tensor) -> torch.Tensor:
        """Return (B, width, H, D) of outputs (N, H, D); other places get zeros."""
        rows = (self.batch_size, self.width)
        if self.places is None:
            return output.view(*rows, *output.shape[1:])
        padded = output.new_zeros((rows[0] * rows[1], *output.shape[1:]))
        padded[self.places] = output
        return padded.view(*rows, *output.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """The queries of causal rows, as requests over their rows' keys.

    A row's real queries are one request. Its last place is answered as well where it is padding
    (behind the row's tokens), because generation reads the logits there: its query sees all real
    keys, so that it is one more request over the same row.

    Attributes:
        rows: row of each request.
        query_lens, seq_lens: queries and keys of each.
        queries: where the queries are, request after request.
        num_unwritten: how many of the last requests are padding, whose keys nobody ever sees.
    """

    rows: tuple[int, ...]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    queries: Tokens
    num_unwritten: int = 0

    @classmethod
    def unpadded(cls, batch_size: int, query_len: int, key_len: int) -> Requests:
        """Return the requests of rows without padding."""
        return cls(
            rows=tuple(range(batch_size)),
            query_lens=(query_len,) * batch_size,
            seq_lens=(key_len,) * batch_size,
            queries=Tokens(batch_size=batch_size, width=query_len),
        )

    @classmethod
    def padded(
        cls, is_real: torch.Tensor, query_len: int, window: Window, device: torch.device
    ) -> Requests:
        """Return the requests of padded rows whose last `query_len` places are queries.

        Args:
            is_real: (B, keys) bool on the host.
            query_len: queries per row.
            window: of the layers.
            device: of the model.
        """
        batch_size, key_len = is_real.shape
        asked = is_real[:, key_len - query_len :]
        seq_lens, query_lens = is_real.sum(1).tolist(), asked.sum(1).tolist()
        rows = [row for row, length in enumerate(query_lens) if length]
        ends = [row for row in range(batch_size) if not asked[row, -1] and seq_lens[row]]
        if is_binding(window, key_len):
            ends = []  # a window counts the padding between: the row has no request for that
        places = asked.flatten().nonzero().squeeze(1)
        last = torch.tensor([row * query_len + query_len - 1 for row in ends], dtype=torch.int64)
        return cls(
            rows=(*rows, *ends),
            query_lens=(*(query_lens[row] for row in rows), *(1 for _ in ends)),
            seq_lens=tuple(seq_lens[row] for row in (*rows, *ends)),
            queries=Tokens(
                batch_size=batch_size,
                width=query_len,
                places=torch.cat((places, last)).to(device),
            ),
            num_unwritten=len(ends),
        )


def is_binding(window: Window, key_len: int) -> bool:
    """Whether a window hides any of `key_len` keys from their queries, causality aside.

    A causal window reaches 0 to the right, where causality hides everything anyway.
    """
    left, right = window
    return any(side is not None and side + 1 < key_len for side in (left, right or None))


def has_gap(is_real: torch.Tensor) -> bool:
    """Whether padding lies between real tokens of a row: (B, width) bool on the host."""
    starts = is_real[:, 1:] & ~is_real[:, :-1]
    return bool((starts.sum(1) + is_real[:, :1].sum(1) > 1).any())


def refuse_gap(window: Window, key_len: int) -> None:
    """Refuse a window over rows with gaps: it counts places, where kernels count tokens.

    Raises:
        UnsupportedOptionError: the window hides some of the `key_len` places.
    """
    if is_binding(window, key_len):
        raise UnsupportedOptionError(
            f"a sliding window of {window} over a padding mask with padding between the tokens of "
            "a row, which rows that are padded on the right get when they grow.",
            hint="pad on the left.",
        )
