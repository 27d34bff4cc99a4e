"""`MLAAttention` on TORCH_MLA: decodes absorbed, prefills expanded, one answer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from mla_cases import BLOCK, DIMS, HEADS, case, layer

from attn_shared.errors import (
    InvalidInputError,
    InvalidRequestError,
    NoBackendError,
    UnknownNameError,
    UnsupportedOptionError,
)
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla import MLAAttention
from attn_shared.spec import BuildConfig
from attn_torch.mla_prefills.torch_sdpa import TorchSDPAPrefill

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fresh_prompt_excuses_no_row_of_a_long_context(dtype: torch.dtype) -> None:
    """Rows over many tokens are small: a tenth of them is less than a fresh row may err."""
    step = case(layer(dtype=dtype), [1, 12, 9], [900, 700, 9])
    output = step.run()[0]
    assert step.report(output, None).ok
    for rows in (slice(0, 1), slice(1, 13)):
        wrong = output.clone()
        wrong[rows] *= 0.9
        assert not step.report(wrong, None).ok


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


def test_an_absorbed_query_is_no_query_of_the_layer() -> None:
    """`forward` absorbs by itself; what it refuses, it refuses before the cache is written."""
    step = case(layer(), [1, 1], [3, 9])
    before = step.kv_cache.clone()
    wrong: dict[str, dict[str, Any]] = {
        "query shape": {"query": torch.zeros(2, HEADS, DIMS.latent_size)},
        "latent shape": {"latent": torch.zeros(2, DIMS.kv_lora_rank + 1)},
        "rope dtype": {"rope": step.rope.double()},
        "kv_cache dtype": {"kv_cache": step.kv_cache.double()},
    }
    for words, change in wrong.items():
        with pytest.raises(InvalidInputError, match=words):
            replace(step, **change).run()
    with pytest.raises(InvalidInputError, match="output shape"):
        step.run(output=torch.zeros(2, HEADS, DIMS.kv_lora_rank))
    assert torch.equal(step.kv_cache, before)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kv_cache_dtype": "fp8_ds_mla"}, NoBackendError, "kv_cache_dtype=fp8_ds_mla"),
        ({"window": (3, 0)}, NoBackendError, r"window=\(3, 0\)"),
        ({"softcap": 30.0}, NoBackendError, r"softcap=30.0"),
        ({"use_sparse": True}, NoBackendError, "sparse=True"),
        ({"backend": "TORCH_SDPA"}, NoBackendError, "mla=True"),
        ({"backend": "TORCH_MLAA"}, UnknownNameError, "TORCH_MLA"),
        ({"prefill": "TORCH_MLA"}, UnknownNameError, "TORCH_SDPA"),
        ({"cache_scale": 0.0}, InvalidInputError, r"cache_scale is 0\.0"),
        ({"head_sizes": 8}, UnknownNameError, "head_sizes"),
        ({"dtype": torch.float64}, UnknownNameError, "float64"),
    ],
)
def test_layers_that_cannot_be(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        layer(**options)


def test_values_are_as_wide_as_the_latent() -> None:
    with pytest.raises(InvalidRequestError, match="head_size_v=12 is not allowed; allowed: 32"):
        replace(layer().request, head_size_v=12)


def test_an_implementation_has_two_calls_and_no_forward() -> None:
    impl = layer().impl
    assert not hasattr(impl, "forward")
    with pytest.raises(AttributeError, match="forward_mha for prefill and forward_mqa for decode"):
        impl.forward  # noqa: B018


def test_the_choice_of_a_prefill_is_shown_and_named() -> None:
    chosen = layer(prefill="TORCH_SDPA").prefill_selection
    assert chosen is not None
    assert (chosen.chosen, str(chosen.decided_by)) == ("TORCH_SDPA", "user")
    with pytest.raises(UnsupportedOptionError, match="prefill=TORCH_SDPA with"):
        layer(prefill="TORCH_SDPA", config=BuildConfig(mla_prefill=chosen.prefill_cls))
    given = layer(config=BuildConfig(mla_prefill=chosen.prefill_cls))
    assert given.prefill_selection is None
    step = case(given, [20], [30])
    assert step.report(*step.run()).ok


def test_a_scale_of_an_unquantised_cache_is_refused() -> None:
    step = case(layer(), [1], [3])
    step.attn.k_scale = 2.0
    with pytest.raises((InvalidInputError, UnsupportedOptionError), match="scale"):
        step.run()


@pytest.mark.parametrize("lens", [BATCHES["mixed"], BATCHES["extends"]])
def test_the_bound_on_expanded_keys_holds(lens: tuple[list[int], list[int]]) -> None:
    """Nothing is expanded at once but the step's own tokens, and a block of earlier ones."""
    seen = []

    class Noting(TorchSDPAPrefill):
        def run(self, query: Any, key: Any, value: Any, part: Any, **options: Any) -> Any:
            seen.append((part.is_causal, len(key)))
            return super().run(query, key, value, part, **options)

    step = case(layer(config=BuildConfig(mla_workspace_bytes=1, mla_prefill=Noting)), *lens)
    assert step.report(*step.run()).ok
    earlier = [count for is_causal, count in seen if not is_causal]
    assert len(earlier) > 2
    assert max(earlier) == BLOCK


def test_a_layer_without_its_projection_has_no_forward() -> None:
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
