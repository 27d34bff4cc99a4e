"""The rows of one call, as samplers take them: numbers, or tensors on the logits' device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_shared._fields import FLOAT32_LEAST, FLOAT32_MOST
from attn_shared.errors import InvalidInputError
from attn_shared.sampling.draws import check_generators, generated, uniforms, word_tensor
from attn_shared.sampling.params import PerRow, SamplingParams

__all__ = ["LARGEST_VOCABULARY", "Rows", "column", "to_device", "uniform_numbers"]

LARGEST_VOCABULARY = 2**22
"""Tokens; the sums of the native path would overflow beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What one call's rows ask, without what is off.

    Attributes:
        params: what this was made of.
        num_rows, vocab_size: B and V.
        temperature: None where it is 1 for all; else a number or (B,) float32, above 0, with 1 for
            greedy rows.
        top_k: None where it is off for all; else a number or (B,) int64, from 1 to V.
        max_k: at least every row's k, as far as the host knows.
        top_p: None where it is off for all; else a number or (B,) float64. 1 or more is off.
        min_p: None where it is off for all; else a number or (B,) float32.
        greedy: None where no row is, else (B,) bool: temperature 0 or top-p 0.
        all_greedy: whether the host knows that every row is.
        broken: None, or (B,) bool: rows with a NaN among their numbers.
    """

    params: SamplingParams
    num_rows: int
    vocab_size: int
    temperature: float | torch.Tensor | None
    top_k: int | torch.Tensor | None
    max_k: int
    top_p: float | torch.Tensor | None
    min_p: float | torch.Tensor | None
    greedy: torch.Tensor | None
    all_greedy: bool
    broken: torch.Tensor | None

    @classmethod
    def of(cls, params: SamplingParams, logits: torch.Tensor) -> Rows:
        """Put what the rows ask beside their logits.

        Args:
            params: what is asked.
            logits: (B, V).

        Raises:
            InvalidInputError: shapes, dtypes or devices do not fit.
        """
        num_rows, vocab_size = _shape(logits)
        check_generators(num_rows, logits.device, params.generator, params.generators)
        take = _Taker(num_rows, logits.device)
        temperature = _in_float32(
            take("temperature", params.temperature, off=1.0, dtype=torch.float64)
        )
        top_p = take("top_p", params.top_p, off=1.0, dtype=torch.float64)
        min_p = take("min_p", params.min_p, off=0.0, dtype=torch.float32)
        top_k = take("top_k", params.top_k, off=0, dtype=torch.int64)
        greedy = None
        for value in (temperature, top_p):
            greedy = _with_zeros(greedy, value, logits)
        if isinstance(temperature, torch.Tensor) and greedy is not None:
            temperature = torch.where(greedy, 1.0, temperature)
        return cls(
            params=params,
            num_rows=num_rows,
            vocab_size=vocab_size,
            temperature=_unless_zero(temperature),
            top_k=_clamped(top_k, vocab_size),
            max_k=_bound(params.top_k, vocab_size),
            top_p=_unless_zero(top_p),
            min_p=min_p,
            greedy=greedy,
            all_greedy=0 in (_number(temperature), _number(top_p)),
            broken=_nan_rows(temperature, top_p, min_p),
        )

    def check_values(self) -> None:
        """Look at numbers in tensors as `SamplingParams` looks at those on the host; waits.

        Raises:
            InvalidInputError: names the argument, the row and what is allowed.
        """
        params = self.params
        SamplingParams(
            temperature=_on_host(params.temperature),
            top_k=_on_host(params.top_k),
            top_p=_on_host(params.top_p),
            min_p=_on_host(params.min_p),
        )


def column(value: float | torch.Tensor) -> float | torch.Tensor:
    """Return a number as it is, and a tensor (B,) as (B, 1)."""
    return value[:, None] if isinstance(value, torch.Tensor) else value


def uniform_numbers(rows: Rows, device: torch.device) -> torch.Tensor:
    """Return the (B,) float64 numbers in [0, 1) that the rows' draws are made with."""
    params, count = rows.params, rows.num_rows
    if params.seeds is None:
        return generated(count, device, params.generator, params.generators)
    seeds, unseeded = _int_rows("seeds", params.seeds, count)
    steps, _ = _int_rows("steps", params.steps, count)
    if seeds.device != steps.device:
        seeds, steps = to_device(seeds, device), to_device(steps, device)
    numbers = to_device(uniforms(seeds, steps), device)
    if unseeded:
        own = to_device(torch.tensor([row not in unseeded for row in range(count)]), device)
        numbers = torch.where(own, numbers, generated(count, device, params.generator, None))
    return numbers


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, by a copy that the host does not wait for."""
    if tensor.device == device:
        return tensor
    if tensor.is_cpu and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


class _Taker:
    """Takes one parameter of the rows: None if it is off for all, a number, or a tensor (B,)."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows, self.device = num_rows, device

    def __call__(
        self, name: str, value: PerRow | None, *, off: float, dtype: torch.dtype
    ) -> float | torch.Tensor | None:
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            _check_length(name, len(value), self.num_rows)
            if value.is_meta and self.device.type != "meta":
                raise InvalidInputError.for_argument(name, "a meta tensor", "numbers")
            return to_device(value, self.device).to(dtype)
        if not isinstance(value, Sequence):
            return None if value == off else value
        _check_length(name, len(value), self.num_rows)
        numbers = [off if number is None else number for number in value]
        if all(number == numbers[0] for number in numbers[1:]) and numbers:
            return None if numbers[0] == off else numbers[0]
        return to_device(torch.tensor(numbers, dtype=dtype), self.device)


def _in_float32(value: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """Return temperatures in the range of float32's normal numbers, 0 (or less) as it is.

    A smaller one would become 0, or its reciprocal infinite, and a larger one infinite. At either
    end float32 logits give the same distribution as beyond it.
    """
    if isinstance(value, torch.Tensor):
        within = value.clamp(FLOAT32_LEAST, FLOAT32_MOST)
        return torch.where(value <= 0, 0.0, within).to(torch.float32)
    return value if not value else float(min(max(value, FLOAT32_LEAST), FLOAT32_MOST))


def _shape(logits: torch.Tensor) -> tuple[int, int]:
    is_served = logits.is_floating_point() and logits.dtype.itemsize > 1
    if logits.dim() != 2 or not is_served or logits.layout is not torch.strided:
        layout = "" if logits.layout is torch.strided else f", {logits.layout}"
        raise InvalidInputError.for_argument(
            "logits",
            f"of shape {tuple(logits.shape)} and dtype {logits.dtype}{layout}",
            "(B, V), dense, of a floating-point dtype of 16 bits or more",
        )
    num_rows, vocab_size = logits.shape
    if not 1 <= vocab_size <= LARGEST_VOCABULARY:
        raise InvalidInputError.for_argument(
            "logits.shape[1]", vocab_size, f"a vocabulary of 1 to {LARGEST_VOCABULARY} tokens"
        )
    return num_rows, vocab_size


def _check_length(name: str, length: int, num_rows: int) -> None:
    if length != num_rows:
        raise InvalidInputError.for_argument(
            name, f"of {length} rows", f"{num_rows}, one per row of the logits"
        )


def _clamped(value: float | torch.Tensor | None, vocab_size: int) -> int | torch.Tensor | None:
    """Return k from 1 to V, V where it is off; None where that is so for all."""
    if isinstance(value, torch.Tensor):
        return torch.where(value < 1, vocab_size, value).clamp(max=vocab_size)
    if value is None or not 1 <= value < vocab_size:
        return None
    return int(value)


def _bound(value: PerRow | None, vocab_size: int) -> int:
    """Return what every row's k is at most, as far as the host knows."""
    if value is None or (isinstance(value, torch.Tensor) and not value.is_cpu):
        return vocab_size
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    each = value if isinstance(value, Sequence) else [value]
    known = [vocab_size if k is None or k < 1 else min(int(k), vocab_size) for k in each]
    return max(known, default=vocab_size)


def _with_zeros(
    greedy: torch.Tensor | None, value: float | torch.Tensor | None, logits: torch.Tensor
) -> torch.Tensor | None:
    """Return the greedy rows, with those whose number is 0 (or less, in a tensor)."""
    if isinstance(value, torch.Tensor):
        zeros = value <= 0
    elif value == 0:
        zeros = logits.new_ones(len(logits), dtype=torch.bool)
    else:
        return greedy
    return zeros if greedy is None else greedy | zeros


def _number(value: float | torch.Tensor | None) -> float | None:
    return None if isinstance(value, torch.Tensor) else value


def _unless_zero(value: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """Return a number that some row needs; where it is 0 for all, all are greedy."""
    return value if isinstance(value, torch.Tensor) or value != 0 else None


def _nan_rows(*values: float | torch.Tensor | None) -> torch.Tensor | None:
    found = None
    for value in values:
        if isinstance(value, torch.Tensor):
            found = value.isnan() if found is None else found | value.isnan()
    return found


def _int_rows(
    name: str, value: int | Sequence[int | None] | torch.Tensor | None, num_rows: int
) -> tuple[torch.Tensor, list[int]]:
    if isinstance(value, torch.Tensor):
        _check_length(name, len(value), num_rows)
        return value.to(torch.int64), []
    each = list(value) if isinstance(value, Sequence) else [value] * num_rows
    _check_length(name, len(each), num_rows)
    return word_tensor(each)
