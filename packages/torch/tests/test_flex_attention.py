"""FLEX_ATTENTION against the float64 reference: uncompiled, compiled, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_torch_testing import Batch, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.arch import parse_arch
from attn_shared.capability import Support
from attn_shared.device import DeviceFacts, preset
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import (
    InvalidInputError,
    InvalidRequestError,
    MetadataError,
    UnsupportedOptionError,
)
from attn_shared.inventory import Inventory
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest, AttentionType, MLADims
from attn_shared.spec import BuildConfig, LayerSpec
from attn_torch._flex_paged import PagedPlan, plan_paged
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
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# torch's own imports on the way to its code generator.
compiles = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:.*tensor cores.*:UserWarning"
)


class _CompiledBuilder(FlexMetadataBuilder):
    """The builder of someone who asked for torch.compile."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, options=FlexOptions(compile=True))


class CompiledBackend(FlexAttentionBackend):
    """The backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[FlexMetadataBuilder]:
        return _CompiledBuilder


class _UncompiledBuilder(FlexMetadataBuilder):
    """The builder of someone who asked for none."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, options=FlexOptions(compile=False))


class UncompiledBackend(FlexAttentionBackend):
    """The backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[FlexMetadataBuilder]:
        return _UncompiledBuilder


def run_and_check(case: Case, **options: Any) -> None:
    batch = case.build()
    batch.check(*batch.run(FlexAttentionBackend, **options))


MIXED = Case(query_lens=(1, 5, 3), seq_lens=(9, 5, 21))
LONG = Case(query_lens=(1, 18, 4), seq_lens=(40, 18, 33), block_size=16)


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
    impl, metadata = _impl_and_metadata(batch)
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


def _with_table(case: Case, rows: Sequence[Sequence[int]]) -> Batch:
    """Return the case's batch over other blocks; all of the cache holds numbers."""
    batch = case.build()
    assert batch.kv_cache is not None
    generator = torch.Generator().manual_seed(5)
    batch.kv_cache.copy_(torch.randn(batch.kv_cache.shape, generator=generator))
    table = torch.tensor(rows, dtype=torch.int32, device=case.device)
    return replace(batch, common=batch.common.with_fields(block_table=table))


SHARED_PREFIX = ((3, 0, 1), (3, 0, 2))
TWO_COLUMNS = ((0, 3, 1), (3, 0, 2))
REPEATED = ((0, 0, 1), (2, 3, 2))
TABLES = pytest.mark.parametrize(
    "rows", [SHARED_PREFIX, TWO_COLUMNS, REPEATED], ids=["shared", "two columns", "repeated"]
)


@TABLES
def test_blocks_in_several_places(rows: Sequence[Sequence[int]]) -> None:
    batch = _with_table(LONG.with_fields(query_lens=(2, 20), seq_lens=(48, 39)), rows)
    batch.check(*batch.run(FlexAttentionBackend))


def test_blocks_left_of_the_window_may_have_been_given_away() -> None:
    case = LONG.with_fields(query_lens=(2, 1), seq_lens=(48, 48), window=(9, 0))
    batch = _with_table(case, ((0, 0, 1), (0, 0, 2)))
    output, _ = batch.run(FlexAttentionBackend, with_lse=False)
    batch.check(output)
    spans = [Span(request=0, query_start=0, query_len=2, position=46, key_len=48)]
    table = PagedTable.read(torch.tensor([[-1, 99, 1]]), spans, Visibility(window=(9, 0)), 16)
    assert table.blocks.tolist() == [[0, 0, 1]]


def test_one_request_cannot_poison_another() -> None:
    batch = _with_table(LONG.with_fields(query_lens=(1, 1), seq_lens=(40, 33)), SHARED_PREFIX)
    clean, _ = batch.run(FlexAttentionBackend)
    assert batch.kv_cache is not None
    batch.kv_cache[1] = torch.nan  # the last block of request 0
    poisoned, _ = batch.run(FlexAttentionBackend)
    assert poisoned[0].isnan().all()
    assert torch.equal(poisoned[1], clean[1])


def _table(rows: Sequence[Sequence[int]], key_lens: Sequence[int]) -> PagedTable:
    spans = [
        Span(request=i, query_start=i, query_len=1, position=key_len - 1, key_len=key_len)
        for i, key_len in enumerate(key_lens)
    ]
    return PagedTable.read(torch.tensor(rows, dtype=torch.int32), spans, Visibility(), 16)


def test_a_block_names_its_position_unless_it_stands_at_two() -> None:
    columns = _table(SHARED_PREFIX, (48, 48)).columns_by_block()
    assert columns is not None
    assert columns.tolist() == [1, 2, 2, 0]
    assert _table(TWO_COLUMNS, (48, 48)).columns_by_block() is None
    assert _table(REPEATED, (48, 48)).columns_by_block() is None
    assert _table(REPEATED, (16, 32)).columns_by_block() is not None  # the repeats are not used


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


# Compiled calls.


@compiles
def test_compiled_in_place() -> None:
    """The kernel reads the cache through the block mask: a shared prefix, two heads per kv head."""
    case = LONG.with_fields(
        query_lens=(2, 20),
        seq_lens=(48, 39),
        causal=(True, False),
        window=(30, 8),
        softcap=2.0,
        has_alibi=True,
        layout=KVCacheLayout.HND,
        mm_prefix_ranges={0: [(3, 47)]},
    )
    batch = _with_table(case, SHARED_PREFIX)
    assert batch.kv_cache is not None
    batch.kv_cache[4:] = torch.nan  # blocks of nobody
    _, metadata = _impl_and_metadata(batch, CompiledBackend)
    assert metadata.compiled is not None
    assert metadata.compiled.slots is None
    output, _ = batch.run(CompiledBackend, with_lse=False)
    batch.check(output)


@compiles
def test_compiled_over_gathered_keys() -> None:
    """Repeated blocks, in bfloat16, with rows that see nothing."""
    case = LONG.with_fields(
        query_lens=(50, 20), seq_lens=(48, 39), dtype=BF16, num_heads=3, num_kv_heads=1
    )
    batch = _with_table(case, REPEATED)
    _, metadata = _impl_and_metadata(batch, CompiledBackend)
    assert metadata.compiled is not None
    assert metadata.compiled.slots is not None
    output, _ = batch.run(CompiledBackend, with_lse=False)
    batch.check(output)


def test_a_cpu_has_sinks_and_lse_without_compilation() -> None:
    batch = LONG.with_fields(has_sinks=True).build()
    batch.check(*batch.run(CompiledBackend))
    output, _ = batch.run(CompiledBackend, with_lse=False)
    batch.check(output)


def _visited(plan: PagedPlan, tile: int) -> dict[int, int]:
    """Return place on the axis -> absolute position, for all keys that a tile visits."""
    size, count = plan.page_size, int(plan.num_pages[tile])
    pages = plan.pages[tile, 0, 0, :count].tolist()
    places = [page * size + offset for page in pages for offset in range(size)]
    return {place: int(plan.positions[place // plan.step]) + place % plan.step for place in places}


def test_tiles_visit_the_pages_of_their_own_request() -> None:
    """Two query rows per tile, a window of 20 keys: which of the cache's pages, and where."""
    case = LONG.with_fields(num_heads=60, query_lens=(1, 4), seq_lens=(48, 39), window=(19, 0))
    batch = _with_table(case, SHARED_PREFIX)
    _, metadata = _impl_and_metadata(batch, CompiledBackend)
    plan = metadata.compiled
    assert plan is not None
    assert plan.rows.num_rows == 2
    assert plan.step == 32  # K and V of a block of 16 lie side by side
    assert plan.num_pages.flatten().tolist() == [2, 2, 2, 0]
    # Position 47 sees 28 to 47: columns 1 and 2, blocks 0 and 1.
    first = _visited(plan, 0)
    assert first == {**{i: 16 + i for i in range(16)}, **{32 + i: 32 + i for i in range(16)}}
    # Positions 35 and 36 see 16 to 36: columns 1 and 2, blocks 0 and 2.
    second = _visited(plan, 1)
    assert second == {**{i: 16 + i for i in range(16)}, **{64 + i: 32 + i for i in range(16)}}
    assert plan.rows.served.tolist() == [0, 1, 2, 3, 4]
    assert plan.rows.rows.tolist()[:6] == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 8},
        {"kv_cache_dtype": "bfloat16"},
        {"block_padding": 3},
    ],
    ids=str,
)
def test_what_cannot_be_read_in_place_is_gathered(changes: dict[str, Any]) -> None:
    _, metadata = _impl_and_metadata(LONG.with_fields(**changes).build(), CompiledBackend)
    assert metadata.compiled is not None
    assert metadata.compiled.slots is not None


def test_padded_blocks_a_whole_number_apart_are_read_in_place() -> None:
    padding = LONG.block_size * LONG.num_kv_heads * LONG.head_size
    _, metadata = _impl_and_metadata(
        LONG.with_fields(block_padding=padding).build(), CompiledBackend
    )
    assert metadata.compiled is not None
    assert metadata.compiled.slots is None
    assert metadata.compiled.step == 48


def test_a_plan_is_for_the_strides_that_the_spec_promises() -> None:
    batch = LONG.build()
    impl, metadata = _impl_and_metadata(batch, CompiledBackend)
    assert batch.kv_cache is not None
    num_blocks, *block = batch.kv_cache.shape
    wider = batch.kv_cache.new_zeros(num_blocks, 2, *block)[:, 0]
    with pytest.raises(InvalidInputError, match=r"key strides in kv_cache.*32 tokens apart"):
        impl.forward(batch.layer, batch.query, None, None, wider, metadata)


def test_gathered_keys_have_a_limit_where_offsets_are_32_bit() -> None:
    spec = _spec(num_kv_heads=32, num_heads=32, head_size=512)
    spans = [Span(request=0, query_start=0, query_len=1, position=2**17 - 1, key_len=2**17)]
    with pytest.raises(MetadataError, match=r"keys to gather.*fewer than 131072.*32-bit"):
        plan_paged(spans, None, Visibility(), spec, torch.device("meta"))


def test_where_calls_are_compiled() -> None:
    gpu = torch.device("cuda", 0)
    assert FlexOptions().compiles_on(gpu)
    assert not FlexOptions().compiles_on(CPU)
    assert FlexOptions(compile=True).compiles_on(CPU)
    assert not FlexOptions(compile=False).compiles_on(gpu)
    with pytest.raises(InvalidRequestError, match=r'compile=.max-autotune.*True, False or "auto"'):
        FlexOptions(compile="max-autotune")  # type: ignore[arg-type]


# What is declared, and what is refused.


def _impl_and_metadata(
    batch: Batch, backend: type[FlexAttentionBackend] = FlexAttentionBackend
) -> tuple[FlexAttentionImpl, Any]:
    spec = batch.spec
    builder = backend.get_builder_cls()(spec.kv_cache_spec, {"layer": spec}, BuildConfig(), CPU)
    return FlexAttentionImpl(spec), builder.build(0, batch.common)


def _spec(**changes: Any) -> LayerSpec:
    return replace(MIXED.build().spec, **changes)


REQUEST = AttentionRequest(num_heads=4, num_kv_heads=2, head_size=64, block_size=16)


@pytest.mark.parametrize("device", ["genericcpu", "spr", "a100", "h200", "b200", "mi300x", "b60"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 192, "head_size_v": 128},
        {"has_sinks": True, "softcap": 30.0, "has_alibi": True, "needs_lse": True},
        {"non_causal": True, "window": (3, 3)},
        {"per_request_causal": True, "use_mm_prefix": True},
        {"attn_type": AttentionType.ENCODER_ONLY, "block_size": None},
        {"dtype": F32, "kv_cache_dtype": "bfloat16", "block_size": 7},
        {"use_kv_connector": True, "chunk_size": 100},
    ],
    ids=str,
)
def test_served_requests(device: str, changes: dict[str, Any]) -> None:
    request = REQUEST.with_options(**changes)
    reasons = FlexAttentionBackend.validate_configuration(request, preset(device), Inventory())
    assert reasons == ()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"batch_invariant": True}, "batch_invariance"),
        ({"dcp_size": 2}, "dcp"),
        ({"pcp_size": 2}, "pcp"),
        ({"chunk_size": 8, "attn_type": AttentionType.ENCODER_DECODER}, "chunks_are_causal"),
        (
            {"mla": MLADims(), "head_size": 576, "num_kv_heads": 1, "block_size": 64},
            "mla",
        ),
    ],
    ids=str,
)
def test_selection_and_constructors_refuse_alike(changes: dict[str, Any], code: str) -> None:
    request = REQUEST.with_options(**changes)
    cpu = preset("genericcpu")
    reasons = FlexAttentionBackend.validate_configuration(request, cpu, Inventory())
    assert code in {reason.code for reason in reasons}
    spec = LayerSpec.from_request(request, scale=1.0, kv_cache_spec=_cache_spec(request))
    with pytest.raises(UnsupportedOptionError, match=f"FLEX_ATTENTION does not serve.*{code}="):
        FlexAttentionImpl(spec)


def _cache_spec(request: AttentionRequest) -> Any:
    from attn_shared.kv_cache import spec_for

    return spec_for(request, block_size=request.block_size or 16)


@pytest.mark.parametrize(
    ("width", "is_served"), [(8, False), (16, True), (512, True), (576, False)]
)
def test_gpus_have_narrower_limits_on_heads(width: int, is_served: bool) -> None:
    request = REQUEST.with_options(head_size=width)
    reasons = FlexAttentionBackend.validate_configuration(request, preset("h100"), Inventory())
    assert [reason.code for reason in reasons] == ([] if is_served else ["head_size"])
    batch = Case(query_lens=(1,), seq_lens=(1,), head_size=width).build()
    arguments = (batch.spec.kv_cache_spec, {"layer": batch.spec}, BuildConfig())
    if is_served:
        FlexMetadataBuilder(*arguments, torch.device("cuda"))
    else:
        with pytest.raises(UnsupportedOptionError, match=f"head_size={width}.*16 to 512"):
            FlexMetadataBuilder(*arguments, torch.device("cuda"))
    FlexMetadataBuilder(*arguments, CPU)


def test_old_nvidia_gpus_are_refused() -> None:
    turing = parse_arch("sm_75")
    facts = DeviceFacts(
        vendor=turing.vendor,
        name="T4",
        arch=turing.canonical,
        capability=turing.capability,
        arch_family=turing.family,
        fp8=turing.fp8,
    )
    reasons = FlexAttentionBackend.validate_configuration(REQUEST, facts, Inventory())
    assert [reason.code for reason in reasons] == ["device"]


def test_cpu_features_are_declared_slow() -> None:
    capability = FlexAttentionBackend.capability(preset("genericcpu"), Inventory())
    assert capability.softcap is Support.SLOW
    assert capability.needs_exact_host_lengths
    assert FlexAttentionBackend.capability(preset("h200"), Inventory()).softcap is Support.YES


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
        ({"dcp_local_seq_lens": torch.ones(3, dtype=torch.int32)}, UnsupportedOptionError, "shard"),
    ],
    ids=str,
)
def test_bad_batches(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    batch = MIXED.build()
    bad = replace(batch, common=batch.common.with_fields(**changes))
    with pytest.raises(error, match=words):
        _impl_and_metadata(bad)


def test_chunks_need_causal_rows() -> None:
    batch = LONG.with_fields(chunk_size=8).build()
    bad = replace(batch, common=batch.common.with_fields(causal=False))
    with pytest.raises(UnsupportedOptionError, match="chunk_size=8 has no rule"):
        _impl_and_metadata(bad)


def test_cascade_is_checked_and_changes_nothing() -> None:
    batch = _with_table(LONG.with_fields(query_lens=(1, 1), seq_lens=(40, 33)), SHARED_PREFIX)
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
    impl, metadata = _impl_and_metadata(batch)
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
    batch = _with_table(case, rows)
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
