"""Writing, gathering and merging around latents with Triton: what torch's ops mean, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_shared import kv_write as by_torch
from attn_shared._mla_forward import gather_latents as gather_by_torch
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.merge import merge_into as merge_by_torch
from attn_shared.quantization import quantize_fp8
from attn_triton.latent_gather import gather_latents
from attn_triton.latent_write import concat_and_cache_mla
from attn_triton.merge import merge_into

FN, E5 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.float32},
    {"dtype": FN, "kv_cache_dtype": "fp8"},
    {"dtype": E5, "kv_cache_dtype": "fp8_e5m2"},
]


def latent_spec(**options: Any) -> MLAAttentionSpec:
    plain = {"block_size": 4, "head_size": 40, "kv_lora_rank": 32}
    return MLAAttentionSpec(**{**plain, **options})


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def of(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [each.to(device) for each in tensors]


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("padding", [0, 64])
@pytest.mark.parametrize("rows", ["dense", "views"])
def test_entries_are_written_as_torch_writes_them(
    options: dict[str, Any], padding: int, rows: str, device: torch.device
) -> None:
    spec = latent_spec(**options)
    if padding:
        spec = latent_spec(**options, page_size_padded=spec.page_size_bytes + padding)
    written = torch.bfloat16 if spec.is_quantized else spec.dtype
    latent, rope = randn(5, 32, seed=1, dtype=written), randn(5, 8, seed=2, dtype=written)
    if rows == "views":
        both = torch.cat((latent, rope), dim=1)
        latent, rope = both[:, :32], both[:, 32:]
    latent, rope = of(device, latent, rope)
    slots = torch.tensor([9, -1, 0, 7], device=device)  # fewer than rows
    scale: Any = torch.tensor([0.3], device=device) if spec.is_quantized else 1.0
    caches = [spec.allocate(3, device) for _ in range(2)]
    concat_and_cache_mla(caches[0], spec, latent, rope, slots, scale=scale)
    by_torch.concat_and_cache_mla(caches[1], spec, latent, rope, slots, scale=scale)
    assert torch.equal(bits(caches[0]), bits(caches[1]))
    assert bits(caches[0]).any()


def test_nothing_is_written_for_no_token(device: torch.device) -> None:
    spec = latent_spec(dtype=torch.float32)
    cache = spec.allocate(1, device)
    latent, rope = torch.ones(2, 32, device=device), torch.ones(2, 8, device=device)
    for slots in ([], [-1, -1]):
        where = torch.tensor(slots, dtype=torch.int64, device=device)
        concat_and_cache_mla(cache, spec, latent, rope, where)
    assert not cache.any()


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 33), (2, 8)), {}, r"latent shape is \(2, 33\); allowed: \(at least 2, 32\)"),
        (((2, 32), (2, 7)), {}, r"rope shape is \(2, 7\)"),
        (((2, 32), (1, 8)), {}, r"rope shape is \(1, 8\)"),
        (((2, 32), (2, 8)), {"scale": 0.5}, "scale is 0.5; allowed: 1 with kv_cache_dtype='auto'"),
    ],
)
def test_what_torch_refuses_is_refused(
    shapes: Any, options: dict[str, Any], message: str, device: torch.device
) -> None:
    spec = latent_spec(dtype=torch.float32)
    cache, slots = spec.allocate(2, device), torch.tensor([0, 1], device=device)
    good = torch.ones(2, 32, device=device), torch.ones(2, 8, device=device)
    concat_and_cache_mla(cache, spec, *good, slots)
    before = cache.clone()
    latent, rope = (torch.zeros(shape, device=device) for shape in shapes)
    with pytest.raises(InvalidInputError, match=message):
        concat_and_cache_mla(cache, spec, latent, rope, slots, **options)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("padding", [0, 64])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_entries_are_read_as_torch_reads_them(
    options: dict[str, Any], padding: int, count: int, device: torch.device
) -> None:
    spec = latent_spec(**options)
    if padding:
        spec = latent_spec(**options, page_size_padded=spec.page_size_bytes + padding)
    cache = spec.allocate(6, device)
    entries = randn(*cache.shape, seed=3).to(device)
    scale: Any = None
    if spec.is_quantized:
        scale = torch.tensor([0.3], device=device) if count > 1 else 0.3
        entries = quantize_fp8(entries, 0.3, spec.dtype)
    cache.copy_(entries)
    dtype = torch.bfloat16 if spec.is_quantized else spec.dtype
    generator = torch.Generator().manual_seed(4)
    slots = torch.randint(0, 24, (count,), generator=generator).to(device)
    found = gather_latents(cache, slots, dtype, scale)
    assert found.shape == (count, 40)
    assert torch.equal(bits(found), bits(gather_by_torch(cache, slots, dtype, scale)))


def test_a_row_of_another_block_is_never_read(device: torch.device) -> None:
    spec = latent_spec(dtype=torch.float32)
    cache = spec.allocate(3, device).fill_(math.nan)
    cache[1, 2] = 5.0
    found = gather_latents(cache, torch.tensor([6], device=device), torch.float32)
    assert (found == 5.0).all()


@pytest.mark.parametrize("found_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [128, 24])
def test_a_part_is_merged_in_place(
    found_dtype: torch.dtype, size: int, device: torch.device
) -> None:
    whole, whole_lse = randn(9, 3, size, seed=5), randn(3, 9, seed=6)
    found, lse = randn(4, 3, size, seed=7, dtype=found_dtype), randn(4, 3, seed=8).T
    whole_lse[1, 3] = lse[2, 1] = -math.inf
    sides = []
    for merge in (merge_into, merge_by_torch):
        total, total_lse, part, part_lse = of(device, whole.clone(), whole_lse.clone(), found, lse)
        merge(total[2:6], total_lse[:, 2:6], part, part_lse)
        sides.append((total, total_lse))
    assert torch.allclose(sides[0][0], sides[1][0], rtol=1e-6, atol=1e-6)
    assert torch.allclose(sides[0][1], sides[1][1], rtol=1e-6, atol=1e-6)
    untouched = torch.tensor([0, 1, 6, 7, 8], device=device)
    assert torch.equal(sides[0][0][untouched], whole.to(device)[untouched])


def test_parts_that_do_not_fit_are_refused(device: torch.device) -> None:
    total, lse = torch.zeros(4, 2, 8, device=device), torch.zeros(2, 4, device=device)
    with pytest.raises(InvalidInputError, match=r"outputs\[1\] is .*\(3, 2, 8\)"):
        merge_into(total, lse, torch.zeros(3, 2, 8, device=device), lse)


def test_a_part_that_asks_for_a_gradient_is_refused(device: torch.device) -> None:
    total, lse = torch.zeros(4, 2, 8, device=device), torch.zeros(2, 4, device=device)
    found = torch.ones(4, 2, 8, device=device, requires_grad=True)
    with pytest.raises(UnsupportedOptionError, match="found"):
        merge_into(total, lse, found, lse.clone())
