"""The batches that vLLM tests its kernels with: lengths, heads, windows and caps of real size.

The numbers are those of its tests/kernels/attention at 0.25.1 to 0.33: test_flash_attn.py,
test_triton_unified_attention.py and test_flashinfer.py (GPU), test_cpu_attn.py (CPU). Inputs, the
answer and what it may err by are this suite's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from attn_conformance.case import Case
from attn_conformance.checks import check_numbers
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_shared.request import window_of

__all__ = ["FIELD_BATCHES", "RULES", "FieldBatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldBatch:
    """Requests and the options that they are tried with, each with each.

    Attributes:
        name: of the batch.
        lengths: (query tokens, keys) of each request.
        heads: (query heads, kv heads).
        head_sizes: widths.
        windows: visible keys, the query's own included; None for all.
        softcaps: None is off.
        is_quick: tried in quick depth too, with the first of each option.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, int], ...]
    head_sizes: tuple[int, ...]
    windows: tuple[int | None, ...] = (None, 256)
    softcaps: tuple[float | None, ...] = (None, 50.0)
    is_quick: bool = False


_GPU_HEADS = ((8, 2), (4, 4), (5, 1))
_GPU_SIZES = (128, 40, 72, 80, 256)

FIELD_BATCHES = (
    FieldBatch(
        name="gpu-mixed",
        lengths=((1, 1328), (5, 18), (129, 463)),
        heads=_GPU_HEADS,
        head_sizes=_GPU_SIZES,
        windows=(None, 64, 128, 256),
        is_quick=True,
    ),
    FieldBatch(
        name="gpu-decode",
        lengths=((1, 523), (1, 37), (1, 2011)),
        heads=_GPU_HEADS,
        head_sizes=_GPU_SIZES,
        windows=(None, 64, 128, 256),
        is_quick=True,
    ),
    FieldBatch(
        name="flashinfer-decode",
        lengths=((1, 1328), (1, 18), (1, 463)),
        heads=((32, 8), (6, 1)),
        head_sizes=(128, 256),
        windows=(None, 64),
        softcaps=(None, 30.0, 50.0),
    ),
    FieldBatch(
        name="cpu-decode",
        lengths=((1, 213), (1, 1), (1, 312), (1, 7), (1, 7812)),
        heads=((9, 3), (8, 2), (4, 4)),
        head_sizes=(96, 128, 512, 80, 112),
    ),
    FieldBatch(
        name="cpu-prefill",
        lengths=((2345, 2345), (5, 5), (3, 16), (134, 5131)),
        heads=((9, 3),),
        head_sizes=(96, 128),
    ),
    FieldBatch(
        name="cpu-mixed",
        lengths=((992, 2456), (1, 1234), (98, 1145), (1, 4162), (2345, 2345)),
        heads=((8, 2),),
        head_sizes=(128, 80),
    ),
)
"""The field's batches. Those with thousands of query tokens are of full depth alone."""


def _of_the_field(depth: Depth, fit: Fit) -> Iterator[Case]:
    for batch in FIELD_BATCHES:
        served = [size for size in batch.head_sizes if size in fit.capability.head_sizes]
        sizes = tuple(served) or (fit.head_size,)
        if depth is Depth.FULL:
            options = product(batch.heads, sizes, batch.windows, batch.softcaps)
        elif batch.is_quick:
            options = product(batch.heads[:1], sizes[:1], batch.windows[:1], (None,))
        else:
            continue
        for heads, head_size, window, softcap in options:
            yield _case(fit, batch, heads, head_size, window, softcap)


def _case(
    fit: Fit,
    batch: FieldBatch,
    heads: tuple[int, int],
    head_size: int,
    window: int | None,
    softcap: float | None,
) -> Case:
    options: dict[str, Any] = {"window": window_of(window), "softcap": softcap}
    dtypes = fit.capability.dtypes
    words = [batch.name, f"{heads[0]}-{heads[1]}x{head_size}"]
    words += [] if window is None else [f"window-{window}"]
    words += [] if softcap is None else [f"softcap-{softcap:g}"]
    return fit.case(
        "-".join(words),
        (query for query, _ in batch.lengths),
        (keys for _, keys in batch.lengths),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        dtype=torch.bfloat16 if torch.bfloat16 in dtypes else fit.dtype,
        block_size=fit.capability.block_size_for(16),
        **options,
    )


RULES = (
    Rule(
        name="field_cases",
        contract="The batches that vLLM tests its kernels with get the specified answer.",
        make=_of_the_field,
        check=check_numbers,
    ),
)
