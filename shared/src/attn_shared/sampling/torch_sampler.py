"""The native path: the rule of `attn_shared.sampling.reference` in torch, on any device."""

from __future__ import annotations

from typing import ClassVar

import torch

from attn_shared.platform import PriorityBand
from attn_shared.sampling.backend import Drawn, SamplerBackend, largest
from attn_shared.sampling.nucleus import cut_by_mass, in_order, whole
from attn_shared.sampling.request import Returns
from attn_shared.sampling.rows import Rows, column, uniform_numbers

__all__ = ["TorchSampler"]


class TorchSampler(SamplerBackend):
    """Orders, masks and inverts the distribution function; no row's answer depends on another."""

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
        ids = _draw(whole(weights).masked_fill_(~kept, 0), uniform_numbers(rows, logits.device))
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
    order, cut = None, None
    if rows.top_k is not None:
        order = in_order(logits, rows.max_k)
        cut = _kth(order, rows.top_k)
    if rows.top_p is not None:
        cut = cut_by_mass(logits, weights, order, cut, top, rows, rows.top_p)
    if cut is not None:
        kept &= logits >= cut
    if rows.min_p is not None:
        kept &= weights >= column(rows.min_p)
    return kept


def _kth(order: torch.Tensor, top_k: int | torch.Tensor) -> torch.Tensor:
    """Return each row's k-th largest logit, (B, 1)."""
    if isinstance(top_k, torch.Tensor):
        return order.gather(1, (top_k - 1)[:, None])
    return order[:, top_k - 1 : top_k]


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
