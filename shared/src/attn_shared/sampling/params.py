"""What the rows of a batch ask of the sampler: temperature, filters, and where draws come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attn_shared._fields import member_of
from attn_shared.errors import InvalidInputError
from attn_shared.sampling.draws import check_words
from attn_shared.sampling.request import Returns, SamplerRequest

__all__ = ["PerRow", "SamplingParams"]

PerRow = float | int | Sequence[float | int | None] | torch.Tensor
"""One number for all rows, or one per row: a sequence, or a tensor of shape (B,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How each row of a batch is sampled.

    A number or a sequence is checked when the object is made. What is in a tensor on a device is
    not looked at, since that would wait for the device (`Sampler(checked=True)` does): there a k
    below 1 is off, a p of 1 or more is off, a p of 0 or less keeps one token, and a row with a NaN
    among its numbers is not valid.

    Attributes:
        temperature: the logits are divided by it; 0 is greedy, None is 1.
        top_k: tokens to keep; None, 0 and -1 are off.
        top_p: part of the probability to keep, in [0, 1]; None and 1 are off, 0 keeps one token.
        min_p: a token's least probability, as a part of the largest; None and 0 are off.
        seeds: of 64 bits, one per row; None for a row without one. A row's draw depends on its seed
            and step alone.
        steps: with seeds, which draw of its request this is: tokens generated so far, say.
        generator: of the rows without a seed or generator of their own; None is the default one of
            the logits' device.
        generators: of single rows, by their place in the batch.
    """

    temperature: PerRow | None = None
    top_k: PerRow | None = None
    top_p: PerRow | None = None
    min_p: PerRow | None = None
    seeds: int | Sequence[int | None] | torch.Tensor | None = None
    steps: int | Sequence[int] | torch.Tensor | None = None
    generator: torch.Generator | None = None
    generators: Mapping[int, torch.Generator] | None = field(default=None)

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing, and seeds without steps.

        Raises:
            InvalidInputError: names the argument, its value and what is allowed.
        """
        _check("temperature", self.temperature, _is_temperature, "a finite number >= 0")
        _check("top_k", self.top_k, _is_top_k, "an int >= 1; None, 0 and -1 are off")
        _check("top_p", self.top_p, _is_part, "a number from 0 to 1; None and 1 are off")
        _check("min_p", self.min_p, _is_part, "a number from 0 to 1; None and 0 are off")
        if self.seeds is not None and self.steps is None:
            raise InvalidInputError.for_argument(
                "steps",
                None,
                "with seeds, an int, one per row, or a tensor",
                hint="the number of tokens that each request has generated; without it, every step "
                "would draw the same number.",
            )
        for name in ("seeds", "steps"):
            if getattr(self, name) is not None:
                check_words(name, getattr(self, name))
        if self.seeds is None and self.steps is not None:
            raise InvalidInputError.for_argument("steps", "given without seeds", "None")
        if self.seeds is not None and self.generators:
            raise InvalidInputError.for_argument(
                "generators", "given beside seeds", "one of the two"
            )

    def request(self, returns: Returns | str = Returns.IDS) -> SamplerRequest:
        """Return the kind of call that this is; an upper bound where numbers are on a device."""
        return SamplerRequest(
            top_k=_may_be_on(self.top_k, lambda k: k >= 1),
            top_p=_may_be_on(self.top_p, lambda p: 0 < p < 1),
            min_p=_may_be_on(self.min_p, lambda p: p > 0),
            own_draws=self.seeds is not None or bool(self.generators),
            returns=member_of(Returns, "returns", returns),
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_temperature(value: float) -> bool:
    return 0 <= value < float("inf")


def _is_top_k(value: float) -> bool:
    return isinstance(value, int) and value >= -1


def _is_part(value: float) -> bool:
    return 0 <= value <= 1


def _check(
    name: str, value: PerRow | None, is_allowed: Callable[[float], bool], allowed: str
) -> None:
    if value is None:
        return
    if isinstance(value, torch.Tensor):
        if value.dim() != 1:
            raise InvalidInputError.for_argument(
                name, f"a tensor of shape {tuple(value.shape)}", "shape (B,), one per row"
            )
        if value.dtype.is_floating_point is (name == "top_k") or value.dtype is torch.bool:
            allowed = "an int dtype" if name == "top_k" else "a floating-point dtype"
            raise InvalidInputError.for_argument(name, f"of dtype {value.dtype}", allowed)
        if value.is_cpu:
            _check(name, value.tolist(), is_allowed, allowed)
        return
    is_one = not isinstance(value, Sequence) or isinstance(value, str)
    numbers = [value] if is_one else list(value)  # type: ignore[arg-type]
    for row, number in enumerate(numbers):
        is_off = number is None
        if not is_off and not (_is_number(number) and is_allowed(number)):  # type: ignore[arg-type]
            place = name if is_one else f"{name}[{row}]"
            raise InvalidInputError.for_argument(place, repr(number), allowed)


def _may_be_on(value: PerRow | None, is_on: Callable[[float], bool]) -> bool:
    if value is None:
        return False
    if isinstance(value, torch.Tensor):
        return not value.is_cpu or any(map(is_on, value.tolist()))
    numbers = value if isinstance(value, Sequence) else (value,)
    return any(number is not None and is_on(number) for number in numbers)
