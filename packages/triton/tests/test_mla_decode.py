"""Decode over latents against the float64 reference, kernel by kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from attn_triton_latents import Latents, Runner, make

from attn_shared.accuracy import check_against_reference, eager_mla_decode
from attn_shared.reference import mla_decode as exact
from attn_triton.tiles import Tile

FEW = Tile(rows=16, keys=16, num_warps=4, stages=2)
MANY = Tile(rows=64, keys=32, num_warps=8, stages=2)
SMALL = (32, 16)  # widths, of which 512 + 64 differs in time alone


def check(batch: Latents, tile: Tile, *, units: int = 6, **options: Any) -> Runner:
    """Run a batch, and hold output and LSE to the budget of eager attention in its dtype."""
    causal = options.setdefault("causal", True)
    runner = Runner(batch, tile, units=units, **{"has_descriptors": False, **options})
    tokens, heads = batch.query.shape[:2]
    output = batch.query.new_full((tokens, heads, batch.latent), float("nan"))
    lse = torch.full((heads, tokens), float("nan"), device=output.device)
    runner(output, lse)
    _compare(batch, causal, output, lse)
    return runner


def _compare(batch: Latents, causal: bool, output: Tensor, lse: Tensor) -> None:
    call: dict[str, Any] = {
        "scale": batch.scale,
        "kv_lora_rank": batch.latent,
        "query_start_loc": batch.starts.cpu(),
        "seq_lens": batch.seq_lens.cpu(),
        "block_table": batch.table.cpu(),
        "cache_scale": batch.cache_scale,
        "causal": causal,
    }
    query, cache = batch.query.cpu(), batch.cache.cpu()
    report = check_against_reference(
        output.cpu(),
        lse.cpu(),
        exact(query, cache, **call),
        eager_mla_decode(query, cache, **call),
        dtype=query.dtype,
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_requests_in_parts_over_small_pages(device: torch.device, page: int) -> None:
    batch = make(device, [70, 3, 33], [1, 1, 1], heads=4, sizes=SMALL, page=page, nan_tails=True)
    runner = check(batch, FEW)
    assert int(runner.plan[0]) > 3  # something was cut


def test_tiles_by_descriptors(device: torch.device) -> None:
    """A tile is a whole page, and half a page; the last one passes the request's end."""
    for page in (16, 32):
        batch = make(device, [70, 3, 33], [1, 1, 1], heads=4, sizes=SMALL, page=page)
        check(batch, FEW, has_descriptors=True)


@pytest.mark.parametrize("tile", [FEW, MANY], ids=["few", "many"])
def test_query_tokens_are_causal_among_themselves(device: torch.device, tile: Tile) -> None:
    batch = make(device, [40, 9, 20], [8, 3, 1], heads=12, sizes=SMALL, page=16)
    check(batch, tile)
    check(batch, tile, causal=False)


def test_heads_fill_several_blocks_of_rows(device: torch.device) -> None:
    batch = make(device, [50, 17], [1, 2], heads=80, sizes=SMALL, page=32)
    check(batch, MANY, has_descriptors=True)


def test_requests_without_keys_or_without_rows(device: torch.device) -> None:
    """An empty request has output 0 and LSE -inf; one without query tokens has no row."""
    batch = make(device, [0, 30, 7, 12], [1, 0, 2, 1], heads=4, sizes=SMALL, page=16)
    check(batch, FEW)
    check(batch, FEW, has_descriptors=True)


@pytest.mark.parametrize("sizes", [(32, 8), (48, 16), (24, 24)])
def test_widths_that_are_no_powers_of_two(device: torch.device, sizes: tuple[int, int]) -> None:
    batch = make(device, [40, 11], [1, 2], heads=5, sizes=sizes, page=16)
    check(batch, FEW)
    check(batch, FEW, has_descriptors=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_other_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    batch = make(device, [40, 11], [1, 2], heads=4, sizes=(144, 16), page=16, dtype=dtype)
    check(batch, FEW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_fp8_cache(device: torch.device, dtype: torch.dtype) -> None:
    batch = make(
        device, [40, 11], [1, 2], heads=4, sizes=SMALL, page=16, dtype=dtype,
        cache_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    check(batch, FEW)


def test_large_queries_over_an_fp8_cache(device: torch.device) -> None:
    """bfloat16 reaches further than float16, in which such a cache is multiplied."""
    batch = make(device, [20], [1], heads=4, sizes=SMALL, page=16, cache_dtype=torch.float8_e4m3fn)
    batch.query *= 2.0**20
    batch.scale *= 2.0**-20
    check(batch, FEW)


def test_parts_that_do_not_depend_on_neighbours(device: torch.device) -> None:
    """In batch-invariant mode a row has the same bits alone and among others."""
    together = make(device, [70, 300, 33], [1, 1, 1], heads=4, sizes=SMALL, page=16)
    check(together, FEW, max_parts=3)
    alone = Latents(
        query=together.query[:1],
        cache=together.cache,
        table=together.table[:1],
        lens=[70],
        query_lens=[1],
        latent=together.latent,
        scale=together.scale,
    )
    outputs = []
    for batch in (together, alone):
        output = torch.empty_like(batch.query[..., :32])
        Runner(batch, FEW, units=6, has_descriptors=False, max_parts=3)(output, None)
        outputs.append(output[:1])
    assert torch.equal(*outputs)


def test_a_page_past_2_31_elements(device: torch.device) -> None:
    """Offsets are 64-bit: the cache is a view whose last block begins beyond 32 bits."""
    if device.type == "cpu":
        pytest.skip("takes 4 GiB of memory")
    blocks, page, width = 60000, 64, 576
    cache = torch.empty(blocks, page, width, dtype=torch.bfloat16, device=device)
    batch = make(device, [100], [1], heads=16, page=page)
    low = batch.table[0, :2].long()
    cache[-2:] = batch.cache[low]
    batch.table[0, :2] = torch.tensor([blocks - 2, blocks - 1], device=device)
    batch.cache = cache[:, :, :]
    runner = Runner(batch, FEW, units=6, has_descriptors=False)
    both = []
    for each in (runner, Runner(batch, FEW, units=6, has_descriptors=True)):
        output = torch.empty(1, 16, 512, dtype=torch.bfloat16, device=device)
        each(output, None)
        both.append(output)
    small = Latents(**{**vars(batch), "cache": cache[-2:].clone()})
    small.table = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    want = torch.empty(1, 16, 512, dtype=torch.bfloat16, device=device)
    Runner(small, FEW, units=6, has_descriptors=False)(want, None)
    assert torch.equal(both[0], want)
    assert torch.equal(both[1], want)
