"""The native path: the rule of `attn_shared.sampling.reference` in torch, on any device.

Probabilities become integers, relative to the row's largest, before anything is summed. Sums of
integers are exact, so that what is kept and what is drawn does not depend on the order in which a
kernel adds, which torch changes with the shape of the batch (a scan of a single row is another
kernel on CUDA than one of many).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from attn_shared.platform import PriorityBand
from attn_shared.sampling.backend import Drawn, SamplerBackend, largest
from attn_shared.sampling.request import Returns
from attn_shared.sampling.rows import Rows, column, uniform_numbers

__all__ = ["TorchSampler"]

_ONE = 2.0**40
"""The weight of the most likely token. 2**22 of them, the largest vocabulary, sum to less than
2**63; a token that is 2**40 times less likely than the first is kept and never drawn."""


class TorchSampler(SamplerBackend):
    """Sorts, masks and inverts the distribution function; no step depends on another row."""

    name: ClassVar[str] = "TORCH"
    description: ClassVar[str] = "the rule in torch: every option, every device"
    priority: ClassVar[int | None] = PriorityBand.PORTABLE
    provenance: ClassVar[str] = "serves every request"

    def sample(self, logits: torch.Tensor, rows: Rows, returns: Returns) -> Drawn:
        """Draw one token per row; see `SamplerBackend.sample`."""
        top, first, valid = largest(logits, rows)
        if rows.all_greedy and returns is Returns.IDS:
            return Drawn(ids=torch.where(valid, first, 0), valid=valid)
        scaled = logits.float() - top.float()[:, None]
        if rows.temperature is not None:
            scaled /= column(rows.temperature)
        weights = scaled.exp()
        kept = _kept(logits, weights, top, rows)
        if rows.greedy is not None:
            tokens = torch.arange(rows.vocab_size, device=logits.device)
            kept = torch.where(rows.greedy[:, None], tokens == first[:, None], kept)
        ids = _draw(_whole(weights).masked_fill_(~kept, 0), uniform_numbers(rows, logits.device))
        ids = torch.where(valid, ids, 0)
        if returns is Returns.IDS:
            return Drawn(ids=ids, valid=valid)
        if returns is Returns.PROCESSED_LOGITS:
            return Drawn(ids=ids, valid=valid, logits=_processed(logits, kept, rows))
        # Of logits relative to the largest, since a small temperature would make others infinite.
        logprobs = scaled.masked_fill_(~kept, -torch.inf).log_softmax(dim=-1)
        return Drawn(ids=ids, valid=valid, logprobs=logprobs)


def _kept(
    logits: torch.Tensor, weights: torch.Tensor, top: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Return (B, V) bool: what the filters keep; rows that are not valid may hold anything."""
    kept = logits > -torch.inf
    if rows.top_k is not None or rows.top_p is not None:
        order = _in_order(logits, rows)
        cut = order[:, -1:] if rows.top_k is None else _kth(order, rows.top_k)
        if rows.top_p is not None:
            cut = _cut_by_mass(logits, weights, order, cut, top, rows, rows.top_p)
        kept &= logits >= cut
    if rows.min_p is not None:
        kept &= weights >= column(rows.min_p)
    return kept


def _in_order(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return each row's logits, the largest first: as many as a filter may keep, but for ties."""
    if rows.top_k is not None and rows.max_k < rows.vocab_size:
        return logits.topk(rows.max_k, dim=-1)[0]
    return logits.sort(dim=-1, descending=True)[0]


def _kth(order: torch.Tensor, top_k: int | torch.Tensor) -> torch.Tensor:
    """Return each row's k-th largest logit, (B, 1)."""
    if isinstance(top_k, torch.Tensor):
        return order.gather(1, (top_k - 1)[:, None])
    return order[:, top_k - 1 : top_k]


def _cut_by_mass(
    logits: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    cut: torch.Tensor,
    top: torch.Tensor,
    rows: Rows,
    top_p: float | torch.Tensor,
) -> torch.Tensor:
    """Return the least logit that top-k and top-p keep, (B, 1).

    A token stays while those before it in the order hold less than p; of equal logits the first
    decides, since a cut is a logit.
    """
    total = _whole(weights).masked_fill_(logits < cut, 0).sum(dim=-1, keepdim=True)
    in_order = order.float() - top.float()[:, None]
    if rows.temperature is not None:
        in_order /= column(rows.temperature)
    whole = _whole(in_order.exp_())
    before = whole.cumsum(dim=-1) - whole
    allowed = column(top_p) * total.double()
    count = (before.double() < allowed).sum(dim=-1, keepdim=True).clamp_(min=1)
    by_mass = torch.maximum(cut, order.gather(1, count - 1))
    if isinstance(top_p, torch.Tensor):
        return torch.where(top_p[:, None] >= 1, cut, by_mass)
    return by_mass


def _whole(weights: torch.Tensor) -> torch.Tensor:
    """Return weights in [0, 1] as int64; a NaN, of a row that is not valid, as 0."""
    return (weights.nan_to_num(nan=0.0) * _ONE).to(torch.int64)


def _draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return for each row the token in whose share of the sum its number falls, (B,)."""
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1]
    place = torch.minimum((numbers * total.double()).to(torch.int64), total - 1)
    return torch.searchsorted(sums, place[:, None], right=True)[:, 0]


def _processed(logits: torch.Tensor, kept: torch.Tensor, rows: Rows) -> torch.Tensor:
    scaled = logits.float()
    if rows.temperature is not None:
        scaled = scaled / column(rows.temperature)
    return scaled.masked_fill(~kept, -torch.inf)
