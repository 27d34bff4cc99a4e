"""What the tests of sampling share: logits with ties, exact rows, chi-square of drawn ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attn_shared_fakes import CPU, registry_of
from hypothesis import strategies as st

from attn_shared.device import Vendor
from attn_shared.sampling.reference import ExactRow, exact_row
from attn_shared.sampling.sampler import Sampler
from attn_shared.selector import Selector

__all__ = [
    "FLOAT32",
    "chi_square_limit",
    "exact_rows",
    "filters",
    "logit_rows",
    "sampler_of",
    "statistic",
]

FLOAT32 = 1e-5
"""A margin below which float32 may decide a cut otherwise than float64."""

# Few values, so that ties are common; all exact in bfloat16.
_LOGITS = st.sampled_from([-math.inf, -3.0, -1.5, 0.0, 0.5, 0.5, 1.0, 2.0, 2.0, 4.0])


@st.composite
def logit_rows(draw: st.DrawFn, least: int = 1) -> torch.Tensor:
    """Rows of one vocabulary, ties and -inf among them."""
    size = draw(st.integers(1, 9))
    rows = draw(
        st.lists(st.lists(_LOGITS, min_size=size, max_size=size), min_size=least, max_size=5)
    )
    return torch.tensor(rows)


@st.composite
def filters(draw: st.DrawFn, num_rows: int) -> dict[str, list[Any]]:
    """What each row asks; every filter may be off."""
    kinds = {
        "temperature": st.sampled_from([0.0, 0.25, 1.0, 2.0]),
        "top_k": st.sampled_from([None, -1, 0, 1, 2, 3, 7, 2**30]),
        "top_p": st.sampled_from([None, 0.0, 0.1, 0.5, 0.7, 0.9, 0.9999999, 1.0]),
        "min_p": st.sampled_from([None, 0.0, 0.01, 0.2, 0.6, 1.0]),
    }
    return {
        name: draw(st.lists(kind, min_size=num_rows, max_size=num_rows))
        for name, kind in kinds.items()
    }


def exact_rows(logits: torch.Tensor, asked: Mapping[str, Sequence[Any]]) -> list[ExactRow]:
    """The reference's answer, row by row."""
    return [
        exact_row(row, **{name: values[index] for name, values in asked.items()})
        for index, row in enumerate(logits.double().tolist())
    ]


def statistic(ids: torch.Tensor, probabilities: Sequence[float]) -> float:
    """Chi-square of drawn ids against what they were drawn from; infinite for an impossible one."""
    counts = torch.bincount(ids.cpu(), minlength=len(probabilities)).tolist()
    total, found = sum(counts), 0.0
    for count, probability in zip(counts, probabilities, strict=True):
        expected = total * probability
        if not expected and count:
            return math.inf
        found += (count - expected) ** 2 / expected if expected else 0.0
    return found


def chi_square_limit(degrees: int) -> float:
    """A bound that a right sampler passes but once in 10**7 (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 5.2 * math.sqrt(spread)) ** 3


def sampler_of(sampler: str = "auto", **options: Any) -> Sampler:
    """A sampler on a CPU whose platform the tests bring; `samplers` are the platform's own."""
    samplers = options.pop("samplers", ())
    registry = registry_of(
        vendor=Vendor.CPU, torch_device_type="cpu", present=(CPU,), samplers=samplers
    )
    return Sampler("cpu", sampler=sampler, selector=Selector(registry), **options)
