"""Where top-p cuts: the least logit that stays, by exact sums over a row's tokens in their order.

Probabilities become integers, relative to the row's largest, before anything is summed. Sums of
integers are exact, so that what is kept and what is drawn does not depend on the order in which a
kernel adds, which torch changes with the shape of the batch (a scan of a single row is another
kernel on CUDA than one of many), nor on how many tokens were put in order.
"""

from __future__ import annotations

import torch

from attn_shared.sampling.rows import Rows, column

__all__ = ["cut_by_mass", "in_order", "whole"]

_ONE = 2.0**40
"""The weight of the most likely token. 2**22 of them, the largest vocabulary, sum to less than
2**63; a token that is 2**40 times less likely than the first is kept and never drawn."""

_CANDIDATES = 1024
"""Tokens that a CPU puts in order first. A model's nucleus is rarely larger; a row whose is has all
of its tokens sorted. Measured on one core at 16 rows of 128,256 (docs/sampling.md)."""


def whole(weights: torch.Tensor) -> torch.Tensor:
    """Return weights in [0, 1] as int64; a NaN, of a row that is not valid, as 0."""
    return (weights.nan_to_num(nan=0.0) * _ONE).to(torch.int64)


def in_order(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return each row's largest logits, (B, count), the largest first."""
    if count < logits.shape[-1]:
        return logits.topk(count, dim=-1)[0]
    return logits.sort(dim=-1, descending=True)[0]


def cut_by_mass(
    logits: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor | None,
    cut: torch.Tensor | None,
    top: torch.Tensor,
    rows: Rows,
    top_p: float | torch.Tensor,
) -> torch.Tensor:
    """Return the least logit that top-k and top-p keep, (B, 1).

    A token stays while those before it in the order hold less than p; of equal logits the first
    decides, since a cut is a logit.

    Args:
        logits: (B, V).
        weights: (B, V), the probabilities by the largest one.
        order: from `in_order`, with all that top-k may keep; None without top-k.
        cut: (B, 1), the least logit that top-k keeps, or None.
        top: (B,), the largest logits.
        rows: what the rows ask.
        top_p: of `rows`.
    """
    mass = whole(weights)
    if cut is not None:
        mass.masked_fill_(logits < cut, 0)
    allowed = column(top_p) * mass.sum(dim=-1, keepdim=True).double()
    temperature = rows.temperature
    if order is not None:
        by_mass, _ = _end(order, top, temperature, allowed)
    elif logits.device.type == "cpu" and rows.vocab_size > 4 * _CANDIDATES:
        by_mass = _end_on_host(logits, top, temperature, allowed, top_p)
    else:  # a device is not waited for, so that it can make no difference how many are enough
        by_mass, _ = _end(in_order(logits, rows.vocab_size), top, temperature, allowed)
    if cut is not None:
        by_mass = torch.maximum(cut, by_mass)
    if isinstance(top_p, torch.Tensor):
        off = by_mass.new_full((), -torch.inf) if cut is None else cut
        return torch.where(top_p[:, None] >= 1, off, by_mass)
    return by_mass


def _end(
    order: torch.Tensor,
    top: torch.Tensor,
    temperature: float | torch.Tensor | None,
    allowed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last logit of an order before which less than is allowed lies, (B, 1).

    Beside it, (B, 1) bool, whether no token past the end of the order could be that one.
    """
    scaled = order.float() - top.float()[:, None]
    if temperature is not None:
        scaled /= column(temperature)
    each = whole(scaled.exp_())
    sums = each.cumsum(dim=-1)
    count = ((sums - each).double() < allowed).sum(dim=-1, keepdim=True).clamp_(min=1)
    return order.gather(1, count - 1), sums[:, -1:].double() >= allowed


def _end_on_host(
    logits: torch.Tensor,
    top: torch.Tensor,
    temperature: float | torch.Tensor | None,
    allowed: torch.Tensor,
    top_p: float | torch.Tensor,
) -> torch.Tensor:
    """Return what `_end` does of all tokens, from the first ones in the rows whose end is there."""
    found, is_end = _end(in_order(logits, _CANDIDATES), top, temperature, allowed)
    is_off = column(top_p) >= 1 if isinstance(top_p, torch.Tensor) else False
    rest = (~(is_end | is_off))[:, 0].nonzero()[:, 0]
    if len(rest):
        own = temperature[rest] if isinstance(temperature, torch.Tensor) else temperature
        order = in_order(logits[rest], logits.shape[-1])
        found[rest] = _end(order, top[rest], own, allowed[rest])[0]
    return found
