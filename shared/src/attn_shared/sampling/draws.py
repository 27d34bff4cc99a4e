"""Random numbers of a step: one uniform number per row, by seed and step or by a generator.

One number is all that a row needs, since its token is found by inverting the distribution
function. By seed and step it is a pure function of the two: no state, so that a request draws
the same tokens whatever shares its batch, after it was preempted, and in a replayed graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attn_shared.errors import InvalidInputError

__all__ = ["check_generators", "check_words", "generated", "uniforms", "word_tensor"]

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): its
# increment and its two multipliers, as int64 holds them.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


def uniforms(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each pair of seed and step.

    Args:
        seeds: (B,) int64.
        steps: (B,) int64, of the same device.

    Returns:
        (B,) float64, multiples of 2**-53.
    """
    mixed = _mix(_mix(seeds + _INCREMENT) + (steps + 1) * _INCREMENT)
    return _shift(mixed, 11).to(torch.float64).mul_(2.0**-53)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Return the finaliser of SplitMix64: int64 products wrap as those of uint64 do."""
    bits = (bits ^ _shift(bits, 30)) * _MULTIPLIER_1
    bits = (bits ^ _shift(bits, 27)) * _MULTIPLIER_2
    return bits ^ _shift(bits, 31)


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift to the right and fill with zeros; int64's own shift copies the sign."""
    return (bits >> count).bitwise_and(2 ** (64 - count) - 1)


def check_words(name: str, value: object) -> None:
    """Refuse seeds or steps that are no ints of 64 bits; what is in a tensor is not looked at.

    Args:
        name: the argument, "seeds" or "steps".
        value: an int, a sequence or a tensor.

    Raises:
        InvalidInputError: names the argument, its value and what is allowed.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
            raise InvalidInputError.for_argument(
                name,
                f"of shape {tuple(value.shape)} and dtype {value.dtype}",
                "(B,), of int32 or int64",
            )
        return
    is_many = isinstance(value, Sequence) and not isinstance(value, str)
    may_be_off = is_many and name == "seeds"
    words: Sequence[object] = value if is_many else [value]  # type: ignore[assignment]
    for row, word in enumerate(words):
        is_off = word is None and may_be_off
        if not is_off and not _is_word(word):
            raise InvalidInputError.for_argument(
                f"{name}[{row}]" if is_many else name,
                repr(word),
                "an int of 64 bits, or None" if may_be_off else "an int of 64 bits",
            )


def _is_word(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64


def word_tensor(words: Sequence[int | None]) -> tuple[torch.Tensor, list[int]]:
    """Return words of 64 bits, signed or not, as int64 on the host, and the rows without one."""
    each = [0 if word is None else word for word in words]
    without = [row for row, word in enumerate(words) if word is None]
    signed = [word - 2**64 if word >= 2**63 else word for word in each]
    return torch.tensor(signed, dtype=torch.int64), without


def check_generators(
    num_rows: int,
    device: torch.device,
    generator: torch.Generator | None,
    generators: Mapping[int, torch.Generator] | None,
) -> None:
    """Refuse a generator of another device, or of no row; arguments as of `generated`.

    Raises:
        InvalidInputError: names it and what is allowed.
    """
    if not isinstance(generators, Mapping | None):
        raise InvalidInputError.for_argument(
            "generators", f"a {type(generators).__name__}", "a mapping of rows to torch.Generators"
        )
    for row, each in (generators or {}).items():
        if not isinstance(row, int) or not 0 <= row < num_rows:
            raise InvalidInputError.for_argument(
                "generators", f"given for row {row!r}", f"rows 0 to {num_rows - 1}"
            )
        _check_device(f"generators[{row}]", each, device)
    if generator is not None:
        _check_device("generator", generator, device)


def generated(
    num_rows: int,
    device: torch.device,
    generator: torch.Generator | None,
    generators: Mapping[int, torch.Generator] | None,
) -> torch.Tensor:
    """Return a number in [0, 1) for each row from generators, each of which moves on by one draw.

    Args:
        num_rows: rows of the batch.
        device: where the numbers are needed.
        generator: of the rows without one of their own; None is the device's default.
        generators: by row.

    Returns:
        (B,) float64.
    """
    own = generators or {}
    if len(own) < num_rows:
        numbers = torch.rand(num_rows, dtype=torch.float64, device=device, generator=generator)
    else:
        numbers = torch.empty(num_rows, dtype=torch.float64, device=device)
    for row, each in own.items():
        numbers[row : row + 1].uniform_(generator=each)
    return numbers


def _check_device(name: str, generator: object, device: torch.device) -> None:
    if not isinstance(generator, torch.Generator):
        raise InvalidInputError.for_argument(name, repr(generator), "a torch.Generator")
    if generator.device.type != device.type:
        raise InvalidInputError.for_argument(
            name, f"a generator of {generator.device}", f"one of the logits' device, {device}"
        )
