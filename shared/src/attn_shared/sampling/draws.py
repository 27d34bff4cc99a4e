"""Random numbers of a step: one uniform number per row, by seed and step or by a generator.

One number is all that a row needs, since its token is found by inverting the distribution
function. By seed and step it is a pure function of the two: no state, so that a request draws
the same tokens whatever shares its batch, after it was preempted, and in a replayed graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attn_shared.errors import InvalidInputError

__all__ = ["check_generators", "generated", "seed_tensor", "uniforms"]

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


def seed_tensor(seeds: Sequence[int | None]) -> tuple[torch.Tensor, list[int]]:
    """Return seeds as int64 on the host, and the rows that have none.

    Args:
        seeds: ints of 64 bits, signed or not; None for a row without a seed.

    Raises:
        InvalidInputError: one is no such int.
    """
    values, unseeded = [], []
    for row, seed in enumerate(seeds):
        if seed is None:
            unseeded.append(row)
            values.append(0)
            continue
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise InvalidInputError.for_argument(
                f"seeds[{row}]", repr(seed), "an int of 64 bits, or None"
            )
        values.append(seed - 2**64 if seed >= 2**63 else seed)
    return torch.tensor(values, dtype=torch.int64), unseeded


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
    for row, each in (generators or {}).items():
        if not 0 <= row < num_rows:
            raise InvalidInputError.for_argument(
                "generators", f"given for row {row}", f"rows 0 to {num_rows - 1}"
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


def _check_device(name: str, generator: torch.Generator, device: torch.device) -> None:
    if generator.device.type != device.type:
        raise InvalidInputError.for_argument(
            name, f"a generator of {generator.device}", f"one of the logits' device, {device}"
        )
