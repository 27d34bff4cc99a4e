"""FLEX_ATTENTION against the float64 reference, and what its calls refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_torch_testing import Batch, Case
from flex_testing import (
    LONG,
    MIXED,
    SHARED_PREFIX,
    TABLES,
    UncompiledBackend,
    compiles,
    impl_and_metadata,
    run_and_check,
    with_table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import (
    InvalidInputError,
    InvalidRequestError,
    MetadataError,
    UnsupportedOptionError,
)
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig, LayerSpec
from attn_torch._flex_table import PagedTable
from attn_torch._spans import Span
from attn_torch._visibility import Visibility
from attn_torch.backends.flex_attention import (
    FlexAttentionBackend,
    FlexAttentionImpl,
    FlexMetadataBuilder,
    FlexOptions,
)

CPU = torch.device("cpu")
CPU = torch.device("cpu")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 1},
        {"block_size": 3, "block_padding": 5},
        {"block_size": 16, "layout": KVCacheLayout.HND},
        {"layout": KVCacheLayout.HND, "block_padding": 2, "num_padding_rows": 3},
        {"dtype": BF16},
        {"dtype": F16, "head_size": 96},
        {"dtype": F16, "kv_cache_dtype": "float32"},
        {"dtype": F32, "kv_cache_dtype": "bfloat16"},
        {"head_size": 1},
        {"head_size": 7, "head_size_v": 20},
        {"head_size": 80, "head_size_v": 33, "layout": KVCacheLayout.HND},
        {"head_size": 576, "head_size_v": 512, "num_kv_heads": 1},
        {"scale": 0.0},
        {"scale": -1.5},
    ],
    ids=str,
)
def test_formats(changes: dict[str, Any]) -> None:
    run_and_check(MIXED.with_fields(**changes))


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 8, 20])
def test_query_heads_per_kv_head(ratio: int) -> None:
    run_and_check(MIXED.with_fields(num_heads=2 * ratio, num_kv_heads=2, has_alibi=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"window": (0, 0)},
        {"window": (6, None)},
        {"window": (6, 3)},
        {"causal": False},
        {"causal": False, "window": (5, 2)},
        {"causal": False, "window": (None, 0)},
        {"causal": (False, True, False)},
        {"causal": (True, False, True), "window": (7, 4)},
        {"chunk_size": 8},
        {"chunk_size": 5, "window": (2, 0)},
        {"softcap": 2.0},
        {"softcap": 0.01, "scale": 1e4},
        {"has_alibi": True},
        {"has_alibi": True, "softcap": 5.0, "causal": False},
        {"has_sinks": True},
        {"has_sinks": True, "dtype": BF16, "window": (3, 0)},
        {"mm_prefix_ranges": {1: [(2, 9)], 2: [(1, 3), (28, 31)]}},
        {"mm_prefix_ranges": {0: [(0, 39)], 2: [(3, 8), (5, 30)]}, "window": (4, 0)},
        {"mm_prefix_ranges": {2: [(0, 31)]}, "chunk_size": 8},
    ],
    ids=str,
)
def test_features(changes: dict[str, Any]) -> None:
    run_and_check(LONG.with_fields(**changes))


def test_everything_at_once() -> None:
    run_and_check(
        LONG.with_fields(
            causal=(True, False, True),
            window=(20, 6),
            softcap=3.0,
            has_alibi=True,
            has_sinks=True,
            mm_prefix_ranges={1: [(0, 17)]},
            num_heads=6,
            dtype=F16,
            block_padding=8,
            layout=KVCacheLayout.HND,
            num_padding_rows=2,
        )
    )


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_nothing(causal: bool, has_sinks: bool) -> None:
    """Padded requests, requests without queries, and more queries than keys."""
    run_and_check(
        Case(
            query_lens=(1, 0, 2, 6, 1),
            seq_lens=(0, 8, 0, 4, 3),
            causal=causal,
            has_sinks=has_sinks,
            num_padding_rows=1,
        )
    )


def test_batch_of_padding_alone() -> None:
    batch = Case(query_lens=(2, 1), seq_lens=(0, 0), has_sinks=True).build()
    output, lse = batch.run(FlexAttentionBackend)
    assert not output.any()
    assert lse is not None
    assert torch.equal(lse, batch.layer.sinks.unsqueeze(1).expand_as(lse))


def test_empty_batch() -> None:
    batch = MIXED.build()
    nobody = CommonAttentionMetadata.from_lengths(
        query_lens=[], seq_lens=[], block_table=torch.zeros(0, 2, dtype=torch.int32)
    )
    empty = replace(batch, common=nobody, query=batch.query[:0])
    output, lse = empty.run(FlexAttentionBackend)
    assert output.shape == (0, 4, 16)
    assert lse is not None
    assert lse.shape == (4, 0)


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
def test_keys_that_come_with_the_call(attn_type: AttentionType) -> None:
    for seq_lens in ((4, 9, 1), (6, 2, 70)):
        case = Case(query_lens=(4, 9, 1), seq_lens=seq_lens, attn_type=attn_type, window=(8, 8))
        run_and_check(case)


def test_encoder_ignores_that_decoders_are_causal() -> None:
    batch = Case(query_lens=(4, 9), seq_lens=(4, 9), attn_type=AttentionType.ENCODER_ONLY).build()
    causal = replace(batch, common=batch.common.with_fields(causal=True))
    causal.check(*causal.run(FlexAttentionBackend))


def test_cross_attention_has_lengths_of_its_own() -> None:
    run_and_check(
        Case(query_lens=(4, 1), seq_lens=(19, 6), attn_type=AttentionType.ENCODER_DECODER)
    )


def test_long_rows_are_cut() -> None:
    """More rows than one tile holds, beside a short request that must not be padded to them."""
    run_and_check(Case(query_lens=(300, 1), seq_lens=(310, 40), head_size=8, block_size=16))


def test_output_and_lse_are_written_in_place() -> None:
    batch = MIXED.build()
    wide = torch.full((9, 4, 40), torch.nan)
    output = wide[..., 8:24]
    result, lse = batch.run(FlexAttentionBackend, output=output)
    assert result is output
    assert wide[..., :8].isnan().all()
    assert wide[..., 24:].isnan().all()
    batch.check(output, lse)


def test_lse_may_be_strided_or_absent() -> None:
    batch = MIXED.with_fields(has_sinks=True).build()
    impl, metadata = impl_and_metadata(batch)
    arguments = (batch.layer, batch.query, None, None, batch.kv_cache, metadata)
    transposed = torch.full((9, 4), torch.nan)
    output = impl.forward(*arguments, lse=transposed.T)
    batch.check(output, transposed.T)
    assert torch.equal(impl.forward(*arguments), output)


def test_inference_mode_and_gradients_change_nothing() -> None:
    batch = MIXED.build()
    output, _ = batch.run(FlexAttentionBackend)
    with torch.inference_mode():
        assert torch.equal(batch.run(FlexAttentionBackend)[0], output)
    trained = replace(batch, query=batch.query.clone().requires_grad_())
    assert torch.equal(trained.run(FlexAttentionBackend)[0], output)


# Block tables: prefixes that are shared, blocks that repeat, blocks of nobody.


@TABLES
def test_blocks_in_several_places(rows: Sequence[Sequence[int]]) -> None:
    batch = with_table(LONG.with_fields(query_lens=(2, 20), seq_lens=(48, 39)), rows)
    batch.check(*batch.run(FlexAttentionBackend))


def test_blocks_left_of_the_window_may_have_been_given_away() -> None:
    case = LONG.with_fields(query_lens=(2, 1), seq_lens=(48, 48), window=(9, 0))
    batch = with_table(case, ((0, 0, 1), (0, 0, 2)))
    output, _ = batch.run(FlexAttentionBackend, with_lse=False)
    batch.check(output)
    spans = [Span(request=0, query_start=0, query_len=2, position=46, key_len=48)]
    table = PagedTable.read(torch.tensor([[-1, 99, 1]]), spans, Visibility(window=(9, 0)), 16)
    assert table.blocks.tolist() == [[0, 0, 1]]


def test_one_request_cannot_poison_another() -> None:
    batch = with_table(LONG.with_fields(query_lens=(1, 1), seq_lens=(40, 33)), SHARED_PREFIX)
    clean, _ = batch.run(FlexAttentionBackend)
    assert batch.kv_cache is not None
    batch.kv_cache[1] = torch.nan  # the last block of request 0
    poisoned, _ = batch.run(FlexAttentionBackend)
    assert poisoned[0].isnan().all()
    assert torch.equal(poisoned[1], clean[1])


@given(data=st.data())
@settings(max_examples=20)
def test_any_batch(data: st.DataObject) -> None:
    """Lengths, windows and blocks as they come."""
    draw = data.draw
    lens = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=5))
    side = st.one_of(st.none(), st.integers(0, 12))
    causal = draw(st.one_of(st.booleans(), st.tuples(*[st.booleans()] * len(lens))))
    run_and_check(
        Case(
            query_lens=[query for query, _ in lens],
            seq_lens=[key for _, key in lens],
            block_size=draw(st.sampled_from((1, 4, 7, 16))),
            causal=causal,
            window=(draw(side), draw(side)),
            has_sinks=draw(st.booleans()),
            softcap=draw(st.sampled_from((None, 1.5))),
            num_padding_rows=draw(st.integers(0, 2)),
            head_size=4,
            seed=draw(st.integers(0, 99)),
        )
    )


# What is refused.


def _spec(**changes: Any) -> LayerSpec:
    return replace(MIXED.build().spec, **changes)


def test_layers_of_one_plan_must_agree() -> None:
    layers = {"a": _spec(window=(3, 0)), "b": _spec(window=(5, 0))}
    with pytest.raises(UnsupportedOptionError, match="agree on window"):
        FlexMetadataBuilder(layers["a"].kv_cache_spec, layers, BuildConfig(), CPU)
    capped = {"a": _spec(softcap=3.0), "b": _spec(softcap=None)}
    FlexMetadataBuilder(capped["a"].kv_cache_spec, capped, BuildConfig(), CPU)


def test_batch_invariance_is_refused_in_the_config_too() -> None:
    spec = _spec()
    config = BuildConfig(batch_invariant=True)
    with pytest.raises(UnsupportedOptionError, match="no batch-invariant mode"):
        FlexMetadataBuilder(spec.kv_cache_spec, {"layer": spec}, config, CPU)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"seq_lens_cpu_is_exact": False}, MetadataError, "upper bound"),
        ({"seq_lens_cpu": None}, MetadataError, "seq_lens_cpu is missing"),
        ({"block_table": None}, MetadataError, "block_table is None"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, MetadataError, "21"),
        ({"block_table": torch.full((3, 8), -1, dtype=torch.int32)}, MetadataError, r"\[0, 0\]"),
        ({"mm_prefix_ranges": {1: [(3, 2)]}}, MetadataError, r"\(3, 2\)"),
        ({"mm_prefix_ranges": {3: [(0, 1)]}}, MetadataError, "mm_prefix_ranges"),
        (
            {"dcp_local_seq_lens": torch.ones(3, dtype=torch.int32)},
            MetadataError,
            "dcp_local_seq_lens",
        ),
    ],
    ids=str,
)
def test_bad_batches(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    batch = MIXED.build()
    bad = replace(batch, common=batch.common.with_fields(**changes))
    with pytest.raises(error, match=words):
        impl_and_metadata(bad)


def test_chunks_need_causal_rows() -> None:
    batch = LONG.with_fields(chunk_size=8).build()
    bad = replace(batch, common=batch.common.with_fields(causal=False))
    with pytest.raises(UnsupportedOptionError, match="chunks_are_causal=8"):
        impl_and_metadata(bad)


def test_cascade_is_checked_and_changes_nothing() -> None:
    batch = with_table(LONG.with_fields(query_lens=(1, 1), seq_lens=(40, 33)), SHARED_PREFIX)
    spec = batch.spec
    builder = FlexMetadataBuilder(spec.kv_cache_spec, {"layer": spec}, BuildConfig(), CPU)
    impl = FlexAttentionImpl(spec)
    output = impl.forward(
        batch.layer, batch.query, None, None, batch.kv_cache, builder.build(32, batch.common)
    )
    batch.check(output)
    with pytest.raises(MetadataError, match="common_prefix_len"):
        builder.build(48, batch.common)


def _forward(batch: Batch, **changes: Any) -> None:
    impl, metadata = impl_and_metadata(batch)
    arguments = {
        "layer": batch.layer,
        "query": batch.query,
        "key": batch.key,
        "value": batch.value,
        "kv_cache": batch.kv_cache,
        "output": None,
        "lse": None,
    }
    impl.forward(metadata=metadata, **(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": torch.zeros(9, 4, 8)}, r"query shape is \(9, 4, 8\)"),
        ({"query": torch.zeros(8, 4, 16)}, "query rows is 8"),
        ({"query": torch.zeros(9, 4, 16, dtype=BF16)}, "query dtype is torch.bfloat16"),
        ({"output": torch.zeros(9, 4, 15)}, "output shape"),
        ({"output": torch.zeros(9, 4, 16, dtype=F16)}, "output dtype"),
        ({"lse": torch.zeros(9, 4)}, "lse shape"),
        ({"lse": torch.zeros(4, 9, dtype=torch.float64)}, "lse dtype"),
        ({"kv_cache": None}, "kv_cache is None"),
        ({"kv_cache": torch.zeros(12, 2, 4, 2, 8)}, "kv_cache shape"),
        ({"kv_cache": torch.zeros(12, 2, 4, 2, 16, dtype=F16)}, "kv_cache dtype"),
        ({"kv_cache": torch.zeros(2, 2, 4, 2, 16)}, r"block_table is naming block \d+; .* 0 to 1"),
    ],
    ids=str,
)
def test_bad_calls(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        _forward(MIXED.build(), **changes)


def test_options_are_never_dropped() -> None:
    plain, sinking = MIXED.build(), MIXED.with_fields(has_sinks=True).build()
    with pytest.raises(UnsupportedOptionError, match="sinks"):
        _forward(plain, layer=sinking.layer)
    with pytest.raises(InvalidInputError, match="sinks"):
        _forward(sinking, layer=plain.layer)
    plain.layer.k_scale = 0.5
    with pytest.raises(UnsupportedOptionError, match=r"k_scale=0\.5"):
        _forward(plain)


def test_encoders_need_keys() -> None:
    batch = Case(query_lens=(3,), seq_lens=(3,), attn_type=AttentionType.ENCODER_ONLY).build()
    with pytest.raises(InvalidInputError, match="key shape is None"):
        _forward(batch, key=None)


def test_where_calls_are_compiled() -> None:
    gpu = torch.device("cuda", 0)
    assert FlexOptions().compiles_on(gpu)
    assert not FlexOptions().compiles_on(CPU)
    assert FlexOptions(compile=True).compiles_on(CPU)
    assert not FlexOptions(compile=False).compiles_on(gpu)
    with pytest.raises(InvalidRequestError, match=r'compile=.max-autotune.*True, False or "auto"'):
        FlexOptions(compile="max-autotune")  # type: ignore[arg-type]


def test_import_loads_no_compiler() -> None:
    code = (
        "import sys, attn_torch.backends.flex_attention\n"
        "loaded = {'torch._dynamo', 'torch._inductor'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# On a GPU, compiled by default.

ON_GPU = LONG.with_fields(device="cuda", query_lens=(1, 18, 4), seq_lens=(140, 18, 70))


@compiles
@pytest.mark.cuda(min_capability=(8, 0))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": BF16, "head_size": 128, "num_heads": 8},
        {"dtype": BF16, "layout": KVCacheLayout.HND, "window": (30, 0), "has_sinks": True},
        {"head_size": 80, "head_size_v": 48, "num_heads": 6, "softcap": 2.0},
        {"dtype": F16, "softcap": 2.0, "has_alibi": True, "block_size": 48},
        {"causal": (True, False, True), "window": (40, 9), "mm_prefix_ranges": {1: [(2, 9)]}},
        {"dtype": BF16, "head_size": 256, "chunk_size": 32, "block_size": 64},
        {"head_size": 512, "num_heads": 2},
        {"dtype": BF16, "head_size": 512, "num_heads": 2},
        {"block_size": 5, "query_lens": (1, 1, 1)},
        {"query_lens": (1, 1, 0), "seq_lens": (33, 0, 16), "num_padding_rows": 2},
        {"query_lens": (30, 2, 200), "seq_lens": (20, 2, 500), "dtype": BF16},
        {"attn_type": AttentionType.ENCODER_ONLY, "seq_lens": (1, 18, 4)},
    ],
    ids=str,
)
def test_gpu(changes: dict[str, Any]) -> None:
    run_and_check(ON_GPU.with_fields(**changes))


@compiles
@pytest.mark.cuda(min_capability=(8, 0))
@TABLES
def test_gpu_blocks_in_several_places(rows: Sequence[Sequence[int]]) -> None:
    case = ON_GPU.with_fields(query_lens=(2, 20), seq_lens=(48, 39))
    batch = with_table(case, rows)
    batch.check(*batch.run(FlexAttentionBackend))


@compiles
@pytest.mark.cuda(min_capability=(8, 0))
def test_gpu_batches_of_other_sizes_share_a_compilation() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    for seed in range(8):
        lens = [1 + (seed * 7 + i * 5) % 30 for i in range(2 + seed)]
        case = ON_GPU.with_fields(
            query_lens=lens, seq_lens=[10 * each for each in lens], head_size=48, seed=seed
        )
        run_and_check(case)
    assert counters["stats"]["unique_graphs"] <= 4  # one per size of tile: 2 to 32 rows


@compiles
@pytest.mark.cuda(min_capability=(8, 0))
def test_gpu_float32_is_ieee_whatever_torch_is_set_to() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        batch = ON_GPU.with_fields(head_size=64).build()
        results = [batch.run(FlexAttentionBackend), batch.run(UncompiledBackend)]
    finally:
        torch.set_float32_matmul_precision(before)
    for output, lse in results:
        batch.check(output, lse)
