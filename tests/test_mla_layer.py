"""`MLAAttention` on TORCH_MLA: decodes absorbed, prefills expanded, one answer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from mla_cases import BLOCK, DIMS, HEADS, case, layer

from attn_shared.errors import InvalidInputError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import BuildConfig

BATCHES = {
    "decodes": ([1, 1, 1], [5, 1, 30]),
    "drafts": ([3, 1, 8, 2], [9, 1, 8, 20]),
    "prefills": ([20, 9, 33], [20, 9, 33]),
    "extends": ([20, 9, 33], [50, 10, 33]),
    "mixed": ([1, 12, 4, 40], [17, 30, 9, 40]),
    "out of order": ([12, 1, 40, 4], [30, 17, 40, 9]),
    "padded": ([1, 1, 20, 9], [5, 0, 20, 0]),
    "empty rows": ([0, 1, 0, 20, 0], [4, 5, 0, 31, 0]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
def test_every_row_equals_the_expanded_computation(lens: tuple[list[int], list[int]]) -> None:
    step = case(layer(), *lens)
    report = step.report(*step.run())
    assert report.ok, str(report)


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_layers_err_no_more_than_expanded_heads_do(
    lens: tuple[list[int], list[int]], dtype: torch.dtype
) -> None:
    """The LSE of absorbed rows is left out: they round the query, which expanded heads do not."""
    step = case(layer(dtype=dtype), *lens)
    report = step.report(step.run()[0], None)
    assert report.ok, str(report)


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
def test_a_bounded_workspace_changes_nothing(lens: tuple[list[int], list[int]]) -> None:
    config = BuildConfig(mla_workspace_bytes=1)
    step = case(layer(config=config), *lens)
    report = step.report(*step.run())
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
def test_an_fp8_cache_is_read_as_it_was_stored(
    lens: tuple[list[int], list[int]], name: str
) -> None:
    step = case(layer(kv_cache_dtype=name, cache_scale=0.03), *lens)
    report = step.report(*step.run())
    assert report.ok, str(report)


def test_a_layer_without_its_projection_has_no_forward() -> None:
    from attn_shared.mla import MLAAttention

    bare = MLAAttention(
        num_heads=HEADS, scale=1.0, dims=DIMS, dtype=torch.float32, block_size=BLOCK
    )
    step = case(layer(), [1], [3])
    with pytest.raises(InvalidInputError, match="kv_b_proj"):
        bare.forward(step.query, step.latent, step.rope, step.kv_cache, bare.plan(step.common))


@pytest.mark.parametrize("lens", [BATCHES["mixed"], BATCHES["drafts"]])
def test_in_batch_invariant_mode_a_request_alone_has_the_same_bits(
    lens: tuple[list[int], list[int]],
) -> None:
    attn = layer(batch_invariant=True, heads=16, dtype=torch.bfloat16)
    step = case(attn, *lens)
    whole, _ = step.run()
    starts = step.common.query_start_loc_cpu.tolist()
    assert step.common.block_table is not None
    for index, (start, stop) in enumerate(pairwise(starts)):
        common = CommonAttentionMetadata.from_lengths(
            query_lens=lens[0][index : index + 1],
            seq_lens=lens[1][index : index + 1],
            block_table=step.common.block_table[index : index + 1],
            block_size=BLOCK,
        )
        alone = replace(
            step,
            common=common,
            query=step.query[start:stop],
            latent=step.latent[start:stop],
            rope=step.rope[start:stop],
        )
        assert torch.equal(alone.run()[0], whole[start:stop])
