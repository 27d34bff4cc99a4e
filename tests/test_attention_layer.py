"""`Attention`, its operator and its ordering, on a real backend and against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared import ops
from attn_shared._handles import layer_of
from attn_shared.errors import (
    InvalidInputError,
    InvalidRequestError,
    MetadataError,
    NoBackendError,
    UnknownNameError,
    UnsupportedOptionError,
)
from attn_shared.kv_cache import AttentionSpec
from attn_shared.layer import Attention
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla import MLAAttention
from attn_shared.reference import AttentionOptions, encoder_attention, paged_attention
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 4
TABLE = torch.tensor([[5, 1, 9], [2, 7, 3], [4, 8, 6]])


def layer(**options: Any) -> Attention:
    plain = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE}
    return Attention(**{**plain, "dtype": torch.float32, "block_size": BLOCK, **options})


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(query_lens: list[int], seq_lens: list[int], **options: Any) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=TABLE[: len(seq_lens)],
        block_size=BLOCK,
        **options,
    )


def step_inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        rows(num_tokens, HEADS, SIZE, seed=1),
        rows(num_tokens, KV_HEADS, SIZE, seed=2),
        rows(num_tokens, KV_HEADS, SIZE, seed=3),
    )


def exact(
    attn: Attention, query: torch.Tensor, kv_cache: torch.Tensor, common: CommonAttentionMetadata
) -> torch.Tensor:
    assert isinstance(attn.kv_cache_spec, AttentionSpec)
    views = attn.kv_cache_spec.split(kv_cache)
    result = paged_attention(
        query,
        views.key,
        views.value,
        AttentionOptions(scale=SIZE**-0.5, window=attn.request.window),
        query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens,
        block_table=TABLE,
    )
    return result.output.float()


def test_prefill_then_decode_over_one_cache() -> None:
    attn = layer()
    kv_cache = attn.allocate(10)
    first = batch([7, 3], [7, 3])
    query, key, value = step_inputs(10)
    output = attn.forward(query, key, value, kv_cache, attn.plan(first))
    torch.testing.assert_close(output, exact(attn, query, kv_cache, first), atol=2e-6, rtol=0)

    second = batch([1, 2], [8, 5])
    query, key, value = step_inputs(3)
    output = attn.forward(query, key, value, kv_cache, attn.plan(second))
    torch.testing.assert_close(output, exact(attn, query, kv_cache, second), atol=2e-6, rtol=0)
    # Token 7 of request 0 went to block 1, slot 3; tokens 3 and 4 of request 1 to blocks 2 and 7.
    assert isinstance(attn.kv_cache_spec, AttentionSpec)
    stored = attn.kv_cache_spec.split(kv_cache).key
    assert torch.equal(stored[1, 3], key[0])
    assert torch.equal(stored[2, 3], key[1])
    assert torch.equal(stored[7, 0], key[2])


def test_output_is_written_in_place_and_returned() -> None:
    attn = layer()
    query, key, value = step_inputs(5)
    output = torch.full_like(query, torch.nan)
    plan = attn.plan(batch([5], [5]))
    assert attn.forward(query, key, value, attn.allocate(10), plan, output) is output
    assert output.isfinite().all()


@pytest.mark.parametrize("with_output", [True, False])
def test_a_batch_in_another_order_comes_back_in_the_callers(with_output: bool) -> None:
    attn = layer(needs_lse=True)
    common = batch([4, 1, 2], [4, 9, 6], is_prefilling=torch.tensor([True, False, True]))
    query, key, value = step_inputs(7)
    plain_cache, ordered_cache = attn.allocate(10), attn.allocate(10)
    history = rows(10, 2, BLOCK, KV_HEADS, SIZE, seed=4)
    plain_cache.copy_(history)
    ordered_cache.copy_(history)
    plain_lse, ordered_lse = torch.zeros(2, HEADS, 7)
    expected = attn.forward(query, key, value, plain_cache, attn.plan(common), lse=plain_lse)

    attn.builder.requires_ordered_batch = True  # type: ignore[misc]
    plan = attn.plan(common)
    assert plan.common.seq_lens.tolist() == [9, 6, 4]
    assert plan.common.query_start_loc.tolist() == [0, 1, 3, 7]
    assert plan.token_order is not None
    assert plan.token_order.tolist() == [4, 5, 6, 0, 1, 2, 3]
    output = torch.empty_like(query) if with_output else None
    got = attn.forward(query, key, value, ordered_cache, plan, output, lse=ordered_lse)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(ordered_lse, plain_lse, atol=2e-6, rtol=0)
    assert torch.equal(plain_cache, ordered_cache)
    if with_output:
        assert got is output


def test_encode_needs_no_cache() -> None:
    attn = layer(attn_type=AttentionType.ENCODER_ONLY, block_size=None)
    query, key, value = step_inputs(9)
    output = attn.encode(query, key, value, [4, 5])
    expected = encoder_attention(
        query,
        key,
        value,
        AttentionOptions(scale=SIZE**-0.5),
        query_start_loc=torch.tensor([0, 4, 9]),
    )
    torch.testing.assert_close(output, expected.output.float(), atol=2e-6, rtol=0)
    with pytest.raises(UnsupportedOptionError, match="needs no cache"):
        attn.allocate(4)
    with pytest.raises(InvalidInputError, match="sum of lengths is 8; allowed: 9"):
        attn.encode(query, key, value, [4, 4])
    with pytest.raises(InvalidInputError, match=r"lengths\[1\] is -1; allowed: an integer >= 0"):
        attn.encode(query, key, value, [10, -1])
    with pytest.raises(InvalidInputError, match="query is a list; allowed"):
        attn.encode([query], key, value, [9])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOptionError, match="ENCODER_ONLY"):
        layer().encode(query, key, value, [9])


def test_scale_and_window_reach_the_backend() -> None:
    attn = layer(window=(2, 0))
    kv_cache = attn.allocate(10)
    common = batch([6], [6])
    query, key, value = step_inputs(6)
    output = attn.forward(query, key, value, kv_cache, attn.plan(common))
    torch.testing.assert_close(output, exact(attn, query, kv_cache, common), atol=2e-6, rtol=0)
    assert layer(scale=0.25).spec.scale == 0.25
    assert layer().spec.scale == SIZE**-0.5


def test_checked_mode_looks_at_contents() -> None:
    attn = layer(config=BuildConfig(checked=True))
    common = batch([1], [4])
    attn.plan(common, num_blocks=10)
    outside = common.with_fields(block_table=torch.full((1, 3), 10, dtype=torch.int32))
    with pytest.raises(MetadataError, match=r"block_table\[0, 0\] is 10"):
        attn.plan(outside, num_blocks=10)
    with pytest.raises(InvalidRequestError, match=r"num_blocks='a' .*>= 1"):
        attn.plan(common, num_blocks="a")  # type: ignore[arg-type]
    layer().plan(outside)  # not looked at otherwise: it would synchronise a device


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"head_size": 0}, InvalidRequestError, "head_size=0 .*>= 1"),
        ({"head_size": -1}, InvalidRequestError, "head_size=-1 "),
        ({"num_heads": 10, "num_kv_heads": 4}, InvalidRequestError, "num_kv_heads=4 .*divisor"),
        ({"block_size": 0}, InvalidRequestError, "block_size=0 "),
        ({"block_size": -16}, InvalidRequestError, "block_size=-16 "),
        ({"backend": "TORCH_SPDA"}, UnknownNameError, "did you mean 'TORCH_SDPA'"),
        ({"backend": "FLASHMLA_SPARSE"}, UnknownNameError, "known .*not provided"),
        ({"device": "meta"}, NoBackendError, "no installed platform has devices of type 'meta'"),
        ({"sinks": torch.zeros(3)}, InvalidInputError, r"sinks shape is \(3,\); allowed: \(6,\)"),
        ({"kv_cache_dtype": "nvfp4"}, NoBackendError, "kv_cache_dtype=nvfp4"),
        ({"device": "bogus"}, InvalidRequestError, "device='bogus' .* a torch device"),
        ({"device": "h200"}, InvalidRequestError, "device='h200' .*attn select"),
        ({"device": 0}, InvalidRequestError, "device=0 "),
        ({"device": None}, InvalidRequestError, "device=None "),
        ({"backend": 3}, InvalidRequestError, "backend=3 "),
        ({"mla": True}, InvalidRequestError, "mla=True .* MLADims"),
        ({"config": {}}, InvalidRequestError, "config={} .* a BuildConfig"),
        ({"scale": "a"}, InvalidRequestError, "scale='a' .* a finite number"),
        ({"windw": 3}, UnknownNameError, "'windw'.* did you mean 'window'"),
        ({"has_sinks": True}, InvalidRequestError, "has_sinks .* pass sinks="),
        ({"sinks": torch.full((6,), torch.nan)}, InvalidInputError, r"sinks\[0\] is nan"),
        ({"sinks": torch.zeros(6).int()}, InvalidInputError, "sinks dtype is torch.int32"),
    ],
)
def test_bad_input_names_the_value_and_what_is_allowed(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        layer(**options)


def test_a_decoder_refuses_the_fields_of_cross_attention() -> None:
    lens = torch.tensor([4], dtype=torch.int32)
    cross = batch([1], [4], encoder_seq_lens=lens, encoder_seq_lens_cpu=lens)
    with pytest.raises(MetadataError, match=r"encoder_seq_lens is given; .* attn_type=decoder"):
        layer().plan(cross)
    with pytest.raises(MetadataError, match="encoder_seq_lens is None"):
        layer(attn_type=AttentionType.ENCODER_DECODER).plan(batch([1], [4]))


def test_cross_attention_keeps_its_keys_where_a_batch_is_reordered() -> None:
    attn = layer(attn_type=AttentionType.ENCODER_DECODER, scale=0.25)
    lens = torch.tensor([2, 1], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[2, 1],
        seq_lens=[2, 5],
        block_table=TABLE[:2],
        encoder_seq_lens=lens,
        encoder_seq_lens_cpu=lens,
        slot_mapping=torch.tensor([20, 21, 8]),  # block 5 of request 0, block 2 of request 1
        causal=False,
    )
    query, key, value = step_inputs(3)
    plain_cache, ordered_cache = attn.allocate(10), attn.allocate(10)
    expected = attn.forward(query, key, value, plain_cache, attn.plan(common))
    attn.builder.requires_ordered_batch = True  # type: ignore[misc]
    plan = attn.plan(common)
    assert plan.token_order is not None
    got = attn.forward(query, key, value, ordered_cache, plan)
    assert torch.equal(plain_cache, ordered_cache)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


def test_a_key_that_would_be_stored_nowhere_is_refused() -> None:
    attn = layer()
    query, key, value = step_inputs(1)
    read_only = batch([1], [4]).with_fields(slot_mapping=None)
    plan, kv_cache = attn.plan(read_only), attn.allocate(10)
    with pytest.raises(InvalidInputError, match=r"key is a tensor; .* no slot_mapping"):
        attn.forward(query, key, value, kv_cache, plan)
    assert attn.forward(query, None, None, kv_cache, plan).isfinite().all()


def test_checked_mode_holds_the_cache_to_the_batch() -> None:
    attn = layer(config=BuildConfig(checked=True))
    query, key, value = step_inputs(4)
    plan = attn.plan(batch([4], [4]))  # block 5
    with pytest.raises(InvalidInputError, match="kv_cache blocks is 5; allowed: at least 6"):
        attn.forward(query, key, value, attn.allocate(5), plan)
    attn.forward(query, key, value, attn.allocate(6), plan)


@pytest.mark.parametrize("name", ["query", "key", "value", "kv_cache", "output"])
def test_what_is_no_tensor_or_shares_memory_leaves_the_cache_alone(name: str) -> None:
    attn = layer()
    query, key, value = step_inputs(2)
    kv_cache = attn.allocate(10)
    plan = attn.plan(batch([2], [2]))
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "kv_cache": kv_cache}
    wrong = torch.zeros(1, HEADS, SIZE).expand(2, -1, -1) if name == "output" else (kv_cache,)
    with pytest.raises(InvalidInputError, match=f"^{name} "):
        attn.forward(**{**given, name: wrong}, plan=plan)
    assert not kv_cache.any()


def test_a_value_is_needed_with_a_key() -> None:
    attn = layer()
    query, key, _ = step_inputs(2)
    with pytest.raises(InvalidInputError, match="value is None"):
        attn.forward(query, key, None, attn.allocate(10), attn.plan(batch([2], [2])))
    with pytest.raises(InvalidInputError, match="value is a tensor; allowed: None where key is"):
        attn.forward(query, None, key, attn.allocate(10), attn.plan(batch([2], [2])))


def test_operator_is_registered_rightly() -> None:
    attn = layer()
    query, key, value = step_inputs(3)
    plan = attn.plan(batch([3], [3]))
    arguments = (query, key, value, attn.allocate(10), torch.empty_like(query), attn.handle)
    with ops.step(plan):
        torch.library.opcheck(torch.ops.attn.forward.default, arguments)


def test_compiles_without_a_graph_break() -> None:
    attn = layer()
    query, key, value = step_inputs(3)
    plan = attn.plan(batch([3], [3]))
    eager_cache, compiled_cache = attn.allocate(10), attn.allocate(10)

    def model(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        return ops.attend(attn, query * 2, key, value, kv_cache) + 1

    expected = attn.forward(query * 2, key, value, eager_cache, plan) + 1
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with ops.step({attn.handle: plan}):
        torch.testing.assert_close(compiled(query, key, value, compiled_cache), expected)
    assert torch.equal(eager_cache, compiled_cache)


def test_operator_without_a_plan_says_so() -> None:
    attn = layer()
    query, key, value = step_inputs(1)
    kv_cache = attn.allocate(10)
    with pytest.raises(InvalidInputError, match=r"ops\.step"):
        ops.attend(attn, query, key, value, kv_cache)
    with (
        ops.step({attn.handle + 1: attn.plan(batch([1], [1]))}),
        pytest.raises(InvalidInputError, match=f"not {attn.handle}"),
    ):
        ops.attend(attn, query, key, value, kv_cache)


def test_handles_do_not_keep_layers_alive() -> None:
    attn = layer()
    handle = attn.handle
    assert layer_of(handle) is attn
    del attn
    with pytest.raises(InvalidInputError, match="living Attention layer"):
        layer_of(handle)


def test_latents_are_offered_backends_for_latents_alone() -> None:
    with pytest.raises(NoBackendError, match="mla=True") as caught:
        MLAAttention(num_heads=16, scale=192**-0.5, backend="TORCH_SDPA")
    assert caught.value.exit_code == 3
    names = {v.name for v in MLAAttention(num_heads=16, scale=192**-0.5).selection.verdicts}
    assert "TORCH_MLA" in names
    assert "TORCH_SDPA" not in names


@pytest.mark.parametrize("name", ["query", "output", "lse"])
def test_a_refused_call_leaves_the_cache_as_it_was(name: str) -> None:
    attention = layer()
    cache, plan = attention.allocate(12), attention.plan(batch([2], [7]))
    wrong = torch.zeros(2, HEADS, SIZE, dtype=torch.float16)
    arguments = {"query": rows(2, HEADS, SIZE), name: wrong}
    new = rows(2, KV_HEADS, SIZE)
    with pytest.raises(InvalidInputError, match=name):
        attention.forward(key=new, value=new, kv_cache=cache, plan=plan, **arguments)
    assert not cache.any()


def test_a_batch_described_for_other_blocks_is_refused() -> None:
    with pytest.raises(MetadataError, match=f"block_size is {BLOCK}; allowed: 8"):
        layer(block_size=8).plan(batch([2], [7]))
    attention = layer(block_size=8)
    new = rows(2, KV_HEADS, SIZE)
    plan = layer().plan(batch([2], [7]))
    with pytest.raises(MetadataError, match="block_size"):
        attention.forward(rows(2, HEADS, SIZE), new, new, attention.allocate(12), plan)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLEX_ATTENTION"])
def test_a_plan_for_another_window_is_refused(backend: str) -> None:
    attention = layer(backend=backend, window=(3, 0))
    plan = layer(backend=backend).plan(batch([2], [7]))
    new = rows(2, KV_HEADS, SIZE)
    cache = attention.allocate(12)
    with pytest.raises(InvalidInputError, match="planned for"):
        attention.forward(rows(2, HEADS, SIZE), new, new, cache, plan)
    assert not cache.any()  # refused before the step's keys were written


def test_a_plan_of_another_backend_is_refused_before_the_cache_is_written() -> None:
    attention = layer(backend="TORCH_SDPA")
    plan = layer(backend="FLEX_ATTENTION").plan(batch([2], [7]))
    new, cache = rows(2, KV_HEADS, SIZE), attention.allocate(12)
    with pytest.raises(InvalidInputError, match="metadata is a FlexMetadata"):
        attention.forward(rows(2, HEADS, SIZE), new, new, cache, plan)
    assert not cache.any()


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLEX_ATTENTION", "CPU_ATTN"])
def test_a_block_past_the_cache_is_refused_before_it_is_written(backend: str) -> None:
    attn = layer(backend=backend, block_size=16, head_size=32)
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[1], seq_lens=[18], block_table=torch.tensor([[5, 1]]), block_size=16
    )
    step = rows(1, HEADS, 32), rows(1, KV_HEADS, 32), rows(1, KV_HEADS, 32)
    kv_cache = attn.allocate(5)
    with pytest.raises(InvalidInputError, match=r"kv_cache blocks is 5; allowed: at least 6"):
        attn.forward(*step, kv_cache, attn.plan(common))
    assert not kv_cache.any()
    attn.forward(*step, attn.allocate(6), attn.plan(common))


def test_a_negative_block_is_refused_when_the_step_is_planned() -> None:
    wrong = batch([1], [5]).with_fields(block_table=torch.tensor([[-2, 1, 0]], dtype=torch.int32))
    with pytest.raises(MetadataError, match=r"block_table\[0, 0\] is -2; allowed: >= 0"):
        layer().plan(wrong)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "CPU_ATTN"])
def test_tensors_that_are_not_dense_are_refused_by_name(backend: str) -> None:
    attn = layer(backend=backend, block_size=16, head_size=32)
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[1], seq_lens=[1], block_table=torch.tensor([[0]]), block_size=16
    )
    plan, kv_cache = attn.plan(common), attn.allocate(1)
    step = [rows(1, HEADS, 32), rows(1, KV_HEADS, 32), rows(1, KV_HEADS, 32), kv_cache]
    for place, name in enumerate(("query", "key", "value", "kv_cache")):
        wrong = [each.to_sparse() if i == place else each for i, each in enumerate(step)]
        with pytest.raises(InvalidInputError, match=f"{name} layout is torch.sparse_coo"):
            attn.forward(wrong[0], wrong[1], wrong[2], wrong[3], plan)
