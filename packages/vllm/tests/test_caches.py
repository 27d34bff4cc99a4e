from __future__ import annotations

import pytest
import torch

from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError
from attn_shared.kv_cache import AttentionSpec, FullAttentionSpec
from attn_vllm.caches import view_cache

BLOCKS, SIZE, HEADS, WIDTH = 5, 4, 3, 8


def spec(layout: KVCacheLayout, width_v: int = WIDTH, **options: object) -> AttentionSpec:
    fields = {"dtype": torch.float32, **options}
    return FullAttentionSpec(
        block_size=SIZE,
        num_kv_heads=HEADS,
        head_size=WIDTH,
        head_size_v=width_v,
        layout=layout,
        **fields,
    )


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize("width_v", [WIDTH, 2 * WIDTH])
def test_every_element_of_a_page_has_one_place(layout: KVCacheLayout, width_v: int) -> None:
    content = WIDTH + width_v
    pages = torch.arange(BLOCKS * HEADS * SIZE * content, dtype=torch.float32)
    tensor = pages.view(BLOCKS, HEADS, SIZE, content)
    described = spec(layout, width_v)
    views = described.split(view_cache(tensor, described))
    assert views.key.shape == (BLOCKS, SIZE, HEADS, WIDTH)
    assert views.value.shape == (BLOCKS, SIZE, HEADS, width_v)
    for block in range(BLOCKS):
        seen = torch.cat([views.key[block].flatten(), views.value[block].flatten()])
        assert torch.equal(seen.sort().values, tensor[block].flatten())


def test_what_is_written_lands_in_the_engine_s_tensor() -> None:
    tensor = torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH)
    described = spec(KVCacheLayout.HND)
    described.split(view_cache(tensor, described)).key[2, 1, 0] = 7.0
    assert tensor[2].count_nonzero() == WIDTH
    assert tensor.count_nonzero() == WIDTH


def test_padded_pages_keep_their_stride() -> None:
    raw = torch.zeros(BLOCKS, HEADS * SIZE * 2 * WIDTH + 32)
    tensor = raw[:, :-32].unflatten(1, (HEADS, SIZE, 2 * WIDTH))
    described = spec(KVCacheLayout.HND)
    described.split(view_cache(tensor, described)).value[4, 3, 2] = 1.0
    assert raw[4].count_nonzero() == WIDTH
    assert raw[:4].count_nonzero() == 0
    assert raw[:, -32:].count_nonzero() == 0


def test_a_cache_of_the_described_shape_is_taken_as_it_is() -> None:
    described = spec(KVCacheLayout.NHD)
    tensor = described.allocate(BLOCKS, "cpu")
    assert view_cache(tensor, described) is tensor


def test_bytes_are_read_as_fp8() -> None:
    tensor = torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH, dtype=torch.uint8)
    described = spec(KVCacheLayout.HND, dtype=torch.float8_e4m3fn, kv_cache_dtype="fp8_e4m3")
    assert view_cache(tensor, described).dtype is torch.float8_e4m3fn


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(BLOCKS, HEADS, SIZE, WIDTH),
        torch.zeros(BLOCKS, HEADS, SIZE, 4 * WIDTH)[..., ::2],
        torch.zeros(0),
    ],
    ids=["half a page", "gaps inside a page", "the placeholder"],
)
def test_other_tensors_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="kv_cache"):
        view_cache(tensor, spec(KVCacheLayout.HND))
