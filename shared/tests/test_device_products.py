"""Eager attention over latents multiplies as the device does, if it has products of 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared import reference
from attn_shared._reference_core import Arithmetic, _products
from attn_shared.accuracy import eager_mla_decode

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def arithmetic(dtype: torch.dtype, *, by_device: bool) -> Arithmetic:
    return Arithmetic(
        operand=dtype,
        accumulate=torch.float32,
        probability=dtype,
        output=dtype,
        by_device=by_device,
    )


def rows(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(shape, generator=generator) for shape in ((3, 2, 576), (130, 576)))
    return tuple(x.to(device, dtype).float() for x in (query + 1, key + 1))  # type: ignore[return-value]


@HALVES
def test_a_cpu_has_exact_products(dtype: torch.dtype) -> None:
    query, key = rows("cpu", dtype)
    own, exact = (
        _products(query, key, arithmetic(dtype, by_device=by_device)) for by_device in (True, False)
    )
    assert torch.equal(own, exact)


@pytest.mark.cuda
@HALVES
def test_a_gpus_products_are_within_what_truncated_sums_lose(dtype: torch.dtype) -> None:
    query, key = rows("cuda", dtype)
    found = _products(query, key, arithmetic(dtype, by_device=True))
    exact = query.double() @ key.double().T
    assert found.dtype is torch.float32
    assert found.shape == exact.shape
    bound = 576 * torch.finfo(torch.float32).eps * (query.abs().double() @ key.abs().double().T)
    assert bool(((found - exact).abs() <= bound).all())


@pytest.mark.cuda
@HALVES
def test_eager_latents_lose_more_than_exact_products_and_less_than_the_dtype(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 3, 576, generator=generator).to("cuda", dtype) * 4
    cache = torch.randn(4, 64, 576, generator=generator).add(1).to("cuda", dtype)
    arguments: dict[str, Any] = {
        "scale": 0.3,
        "kv_lora_rank": 512,
        "query_start_loc": torch.tensor([0, 1, 2]),
        "seq_lens": torch.tensor([128, 65]),
        "block_table": torch.tensor([[0, 1], [2, 3]]),
    }
    exact = reference.mla_decode(query, cache, **arguments)
    eager = eager_mla_decode(query, cache, **arguments)
    error = (eager.lse.double() - exact.lse).abs().amax() / exact.lse.abs().amax()
    assert 0 < float(error) < torch.finfo(dtype).eps
