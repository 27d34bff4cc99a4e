"""Numbers by seed and step."""

from __future__ import annotations

import torch

from attn_shared.sampling.draws import uniforms


def split_mix_64(state: int) -> int:
    """The generator's output for a state, in Python's integers."""
    mask = 2**64 - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


def test_numbers_are_those_of_split_mix_64() -> None:
    increment, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    seeds, steps = [0, 1, -1, 2**62 + 12345], [0, 3, 2**40, 7]
    expected = [
        (split_mix_64(split_mix_64(seed + increment & mask) + (step + 1) * increment & mask) >> 11)
        * 2.0**-53
        for seed, step in zip(seeds, steps, strict=True)
    ]
    assert uniforms(torch.tensor(seeds), torch.tensor(steps)).tolist() == expected
    # The published first outputs of state 1234567 begin with 6457827717110365317.
    assert split_mix_64(1234567 + increment & mask) == 6457827717110365317


def test_numbers_fill_the_interval_evenly() -> None:
    found = uniforms(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64))
    assert float(found.min()) >= 0
    assert float(found.max()) < 1
    counts = torch.histc(found.float(), bins=100, min=0, max=1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 180  # 99 degrees: once in 10**6
