"""TORCH_SDPA against the float64 reference: every feature, dtype, layout and kind of attention."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attn_torch_testing import Batch, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.dtypes import KVCacheLayout
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig
from attn_torch import _runner
from attn_torch.backends.torch_sdpa import (
    TorchSDPABackend,
    TorchSDPAImpl,
    TorchSDPAMetadata,
    TorchSDPAMetadataBuilder,
)

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ENCODER, CROSS = AttentionType.ENCODER, AttentionType.ENCODER_DECODER

# Decodes, drafts, a prompt, a prompt's rest, no rows, a padded request, more rows than keys.
MIXED = {"query_lens": (1, 3, 7, 5, 0, 2, 4), "seq_lens": (13, 9, 7, 18, 5, 0, 2)}

FEATURES = {
    "plain": {},
    "window": {"window": (3, 0)},
    "no_left": {"window": (None, 0), "causal": False},
    "two_sided": {"window": (2, 1), "causal": False},
    "chunks": {"chunk_size": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "non_causal": {"causal": False},
    "per_request": {"causal": (True, False, True, False, True, False, True)},
    "ranges": {"mm_prefix_ranges": {1: [(4, 8)], 2: [(0, 2), (4, 5)], 3: [(2, 15)]}},
    "ranges_in_window": {"mm_prefix_ranges": {3: [(1, 16)]}, "window": (2, 0)},
    "all": {
        "window": (6, 0),
        "softcap": 2.0,
        "has_sinks": True,
        "has_alibi": True,
        "mm_prefix_ranges": {3: [(0, 16)]},
    },
}


def _check(case: Case) -> None:
    """Hold both paths to the budget: without LSE the fast one where it serves, with LSE exact."""
    batch = case.build()
    for with_lse in (False, True):
        batch.check(*batch.run(TorchSDPABackend, with_lse=with_lse))


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, dtype, layout):
    _check(Case(**MIXED, dtype=dtype, layout=layout, num_padding_rows=3, **FEATURES[feature]))


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 8, 20])
def test_any_number_of_query_heads_per_kv_head(ratio):
    _check(Case(**MIXED, num_heads=2 * ratio, num_kv_heads=2))
    _check(Case(**MIXED, num_heads=ratio, num_kv_heads=1, has_sinks=True, has_alibi=True))


@pytest.mark.parametrize("head_size", [1, 40, 64, 80, 96, 128, 192, 256, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(head_size, dtype):
    _check(Case(query_lens=(1, 6), seq_lens=(9, 6), head_size=head_size, dtype=dtype))


@pytest.mark.parametrize(("head_size", "head_size_v"), [(24, 16), (16, 24), (192, 128), (5, 1)])
@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_values_of_another_width(head_size, head_size_v, layout):
    _check(Case(**MIXED, head_size=head_size, head_size_v=head_size_v, layout=layout))


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize(("block_size", "block_padding"), [(1, 0), (3, 1), (16, 24), (64, 0)])
def test_block_sizes_and_padded_blocks(block_size, block_padding, layout):
    _check(Case(**MIXED, block_size=block_size, block_padding=block_padding, layout=layout))


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    ["float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"],
)
def test_cache_formats(name, dtype, layout):
    scales = {"k_scale": 0.5, "v_scale": 0.031} if name.startswith("fp8") else {}
    _check(Case(**MIXED, kv_cache_dtype=name, dtype=dtype, layout=layout, **scales))


@pytest.mark.parametrize("flavour", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_scales_per_head_in_both_flavours(flavour):
    k_scale, v_scale = torch.tensor([0.25, 1.5]), torch.tensor([2.0, 0.03])
    _check(
        Case(
            **MIXED,
            kv_cache_dtype="fp8",
            fp8_e4m3_dtype=flavour,
            k_scale=k_scale,
            v_scale=v_scale,
            block_padding=5,
        )
    )


def test_int8_with_values_of_another_width():
    _check(Case(**MIXED, kv_cache_dtype="int8_per_token_head", head_size=10, head_size_v=6))


@pytest.mark.parametrize("attn_type", [ENCODER, AttentionType.ENCODER_ONLY])
@pytest.mark.parametrize("window", [(None, None), (2, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_encoders(attn_type, window, dtype):
    lens = (4, 4, 4, 9, 0, 1)
    options = {"attn_type": attn_type, "window": window, "dtype": dtype, "num_padding_rows": 2}
    _check(Case(query_lens=lens, seq_lens=lens, **options))
    _check(Case(query_lens=lens, seq_lens=(3, 7, 0, 9, 2, 1), head_size_v=9, **options))


@pytest.mark.parametrize("feature", ["sinks", "alibi", "softcap"])
def test_encoders_by_the_exact_path(feature):
    lens = (4, 4, 9)
    _check(Case(query_lens=lens, seq_lens=lens, attn_type=ENCODER, **FEATURES[feature]))


def test_equal_encoder_requests_with_grouped_heads_and_long_windows():
    case = Case(query_lens=(70, 70), seq_lens=(70, 70), attn_type=ENCODER, window=(9, 9))
    _check(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention_reads_the_encoders_keys(dtype):
    case = Case(query_lens=(1, 5, 1, 2), seq_lens=(11, 3, 0, 9), attn_type=CROSS, dtype=dtype)
    _check(case)


@pytest.mark.parametrize("query_len", [1, 3])
def test_grouped_rows_without_a_causal_mask(query_len):
    lens = {"query_lens": (query_len,) * 4, "seq_lens": (11, 9, 12, 10)}
    for attn_type in (AttentionType.DECODER, CROSS):
        case = Case(**lens, causal=False, attn_type=attn_type)
        (plan,) = _prepared(case.build())[1].plans.values()
        assert len(plan.tiles) == 1
        _check(case)


def test_a_long_prefill_is_cut_into_masked_rows():
    options = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "block_size": 16}
    _check(Case(query_lens=(600,), seq_lens=(700,), **options))
    _check(Case(query_lens=(600,), seq_lens=(600,), window=(50, 0), **options))


def test_a_scale_that_is_not_positive_takes_the_exact_path():
    _check(Case(**MIXED, scale=-0.1))
    _check(Case(**MIXED, scale=0.0))


@pytest.mark.parametrize("logits_bytes", [4, 700])
def test_bounded_logits_change_nothing(logits_bytes, monkeypatch):
    monkeypatch.setattr(_runner, "LOGITS_BYTES", logits_bytes)
    _check(Case(**MIXED, **FEATURES["all"]))
    _check(Case(**MIXED))


def test_a_fallback_to_whole_matrices_is_bounded_too(monkeypatch):
    monkeypatch.setattr("attn_torch._paths.is_fused", lambda device: False)
    for logits_bytes in (4, 700, 10**6):
        monkeypatch.setattr(_runner, "LOGITS_BYTES", logits_bytes)
        _check(Case(**MIXED, window=(9, 0)))


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("feature", ["plain", "sinks"])
def test_float32_stays_ieee_whatever_the_process_allows(precision, feature):
    torch.set_float32_matmul_precision(precision)
    try:
        batch = Case(**MIXED, head_size=128, **FEATURES[feature]).build()
        results = [batch.run(TorchSDPABackend, with_lse=flag) for flag in (False, True)]
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    for result in results:
        batch.check(*result)


def test_an_empty_batch():
    output, lse = Case(query_lens=(), seq_lens=()).build().run(TorchSDPABackend)
    assert output.shape == (0, 4, 16)
    assert lse is not None
    assert lse.shape == (4, 0)


def test_a_batch_of_padding_alone_is_zero_with_the_sink_as_lse():
    batch = Case(query_lens=(1, 1), seq_lens=(0, 0), has_sinks=True).build()
    output, lse = batch.run(TorchSDPABackend)
    assert not output.any()
    assert lse is not None
    assert torch.equal(lse, batch.layer.sinks.unsqueeze(1).expand(4, 2))


_LENGTHS = st.tuples(
    st.sampled_from([0, 1, 1, 2, 5, 13]), st.one_of(st.just(0), st.integers(0, 30))
)


@given(
    lengths=st.lists(_LENGTHS, min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 8, 16]),
    heads=st.sampled_from([(1, 1), (6, 2), (5, 1)]),
    window=st.sampled_from([(None, None), (0, 0), (4, None), (7, 2)]),
    causal=st.booleans(),
    layout=st.sampled_from(KVCacheLayout),
    dtype=st.sampled_from(DTYPES),
    extras=st.sampled_from([{}, {}, {"has_sinks": True}, {"softcap": 3.0}, {"has_alibi": True}]),
    batch_invariant=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, derandomize=True, deadline=None)
def test_batches(
    lengths, block_size, heads, window, causal, layout, dtype, extras, batch_invariant, seed
):
    case = Case(
        query_lens=[query for query, _ in lengths],
        seq_lens=[query + old for query, old in lengths],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        block_size=block_size,
        window=window,
        causal=causal,
        layout=layout,
        dtype=dtype,
        batch_invariant=batch_invariant,
        seed=seed,
        **extras,
    )
    batch = case.build()
    batch.check(*batch.run(TorchSDPABackend, with_lse=bool(seed % 2)))


# What the tensors of a call may be.


def _prepared(batch: Batch, **config) -> tuple[TorchSDPAImpl, TorchSDPAMetadata]:
    builder = TorchSDPAMetadataBuilder(
        batch.spec.kv_cache_spec, {"layer": batch.spec}, BuildConfig(**config), CPU
    )
    return TorchSDPAImpl(batch.spec), builder.build(0, batch.common)


def _forward(batch: Batch, **tensors) -> torch.Tensor:
    impl, metadata = _prepared(batch)
    arguments = {
        "layer": batch.layer,
        "query": batch.query,
        "key": batch.key,
        "value": batch.value,
        "kv_cache": batch.kv_cache,
        "metadata": metadata,
    }
    return impl.forward(**(arguments | tensors))


def test_the_output_is_written_in_place_and_returned():
    batch = Case(**MIXED).build()
    output = torch.full_like(batch.query, 7.0)
    assert _forward(batch, output=output) is output
    batch.check(output)


def test_tensors_of_any_strides():
    batch = Case(**MIXED).build()
    rows, heads, width = batch.query.shape
    query = torch.zeros(rows, heads + 2, width + 1)[:, 1:-1, 1:]
    query.copy_(batch.query)
    output = torch.zeros(rows, heads, 2, width)[:, :, 1]
    lse = torch.zeros(rows, heads).t()
    _forward(batch, query=query, output=output, lse=lse)
    batch.check(output, lse)
    _forward(batch, query=query, output=output)
    batch.check(output)


def test_encoder_keys_may_be_views_of_one_projection():
    lens = (4, 4, 6)
    batch = Case(query_lens=lens, seq_lens=lens, num_kv_heads=4, attn_type=ENCODER).build()
    assert batch.key is not None
    assert batch.value is not None
    fused = torch.stack([batch.query, batch.key, batch.value], dim=1)
    query, key, value = fused.unbind(1)
    batch.check(_forward(batch, query=query, key=key, value=value))


def test_rows_that_belong_to_no_request_are_not_read():
    batch = Case(**MIXED, num_padding_rows=4).build()
    assert batch.query[-4:].isnan().all()
    output = _forward(batch)
    assert output[:-4].isfinite().all()


class _NoReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses every operator that would bring a tensor's value to the host."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.READS, f"forward ran {func}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_forward_reads_no_value_of_any_tensor(feature, with_lse):
    batch = Case(**MIXED, kv_cache_dtype="fp8", k_scale=torch.tensor([0.5, 2.0])).with_fields(
        **FEATURES[feature]
    )
    batch = batch.build()
    impl, metadata = _prepared(batch)
    lse = torch.zeros(batch.query.shape[1], batch.query.shape[0]) if with_lse else None
    with _NoReads():
        output = impl.forward(
            batch.layer, batch.query, None, None, batch.kv_cache, metadata, lse=lse
        )
    batch.check(output, lse)


# What shares a batch.


def _alone(batch: Batch, request: int) -> Batch:
    """Return one request of a paged batch as a batch of its own, over the same cache."""
    starts = batch.common.query_start_loc_cpu.tolist()
    case = batch.case.with_fields(
        query_lens=batch.case.query_lens[request : request + 1],
        seq_lens=batch.case.seq_lens[request : request + 1],
    )
    assert batch.common.block_table is not None
    common = case.build().common
    return replace(
        batch,
        case=case,
        query=batch.query[starts[request] : starts[request + 1]].clone(),
        common=replace(common, block_table=batch.common.block_table[request : request + 1].clone()),
    )


@pytest.mark.parametrize("head_size", [5, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_batch_invariance_is_bitwise(head_size, dtype, with_lse):
    case = Case(
        query_lens=(1, 1, 4, 9, 1, 3),
        seq_lens=(37, 37, 36, 9, 40, 30),
        num_heads=6,
        num_kv_heads=2,
        head_size=head_size,
        dtype=dtype,
        batch_invariant=True,
    )
    batch = case.build()
    output, lse = batch.run(TorchSDPABackend, with_lse=with_lse)
    starts = batch.common.query_start_loc_cpu.tolist()
    for request in range(len(case.query_lens)):
        rows = slice(starts[request], starts[request + 1])
        own, own_lse = _alone(batch, request).run(TorchSDPABackend, with_lse=with_lse)
        assert torch.equal(output[rows], own)
        assert own_lse is None or (lse is not None and torch.equal(lse[:, rows], own_lse))


def test_encoder_requests_are_invariant_too():
    case = Case(query_lens=(6, 6, 6), seq_lens=(6, 6, 6), attn_type=ENCODER, batch_invariant=True)
    batch = case.build()
    output, _ = batch.run(TorchSDPABackend, with_lse=False)
    assert batch.key is not None
    assert batch.value is not None
    one = case.with_fields(query_lens=(6,), seq_lens=(6,)).build()
    for start in (0, 6, 12):
        rows = slice(start, start + 6)
        own = replace(
            one, query=batch.query[rows], key=batch.key[rows], value=batch.value[rows]
        ).run(TorchSDPABackend, with_lse=False)[0]
        assert torch.equal(output[rows], own)


def test_the_config_alone_makes_requests_calls_of_their_own():
    batch = Case(query_lens=(1, 1), seq_lens=(9, 9)).build()
    _, shared = _prepared(batch)
    _, apart = _prepared(batch, batch_invariant=True)
    (plan,), (other) = shared.plans.values(), next(iter(apart.plans.values()))
    assert (len(plan.tiles), len(other.tiles)) == (1, 2)


# One layer over several steps.


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8_per_token_head"])
def test_steps_write_and_read_the_cache(kv_cache_dtype):
    case = Case(query_lens=(2,), seq_lens=(7,), kv_cache_dtype=kv_cache_dtype)
    batch = case.build()
    impl, metadata = _prepared(batch)
    assert batch.kv_cache is not None
    assert batch.common.block_table is not None
    generator = torch.Generator().manual_seed(5)
    key, value = torch.randn(2, 2, 2, 16, generator=generator)
    table = batch.common.block_table[0].tolist()
    slots = torch.tensor([table[position // 4] * 4 + position % 4 for position in (5, 6)])
    before = _forward(batch)
    impl.do_kv_cache_update(batch.layer, key, value, batch.kv_cache, slots)
    output = impl.forward(batch.layer, batch.query, key, value, batch.kv_cache, metadata)
    assert not torch.equal(output, before)
    batch.check(output)


def test_scale_tensors_of_one_are_accepted_without_a_quantised_cache():
    batch = Case(**MIXED).build()
    ones = SimpleNamespace(**(vars(batch.layer) | {"k_scale": torch.ones(1), "v_scale": 1.0}))
    batch.check(_forward(batch, layer=ones))


# The same on an accelerator.


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_on_cuda(feature, dtype):
    for layout in KVCacheLayout:
        _check(Case(**MIXED, dtype=dtype, layout=layout, device="cuda", **FEATURES[feature]))


@pytest.mark.cuda
@pytest.mark.parametrize("head_size", [1, 40, 64, 80, 96, 128, 192, 256, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes_on_cuda(head_size, dtype):
    sizes = {"query_lens": (1, 6, 1, 70), "seq_lens": (9, 6, 11, 90), "head_size": head_size}
    _check(Case(**sizes, dtype=dtype, device="cuda"))
    _check(Case(**sizes, dtype=dtype, device="cuda", head_size_v=24))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8_per_token_head", "float32"])
def test_cache_formats_on_cuda(name):
    for dtype in DTYPES:
        _check(Case(**MIXED, kv_cache_dtype=name, dtype=dtype, device="cuda"))


@pytest.mark.cuda
def test_encoders_and_cross_attention_on_cuda():
    lens = (4, 4, 4, 9, 0, 1)
    _check(Case(query_lens=lens, seq_lens=lens, attn_type=ENCODER, device="cuda"))
    _check(Case(query_lens=lens, seq_lens=(3, 7, 0, 9, 2, 1), attn_type=CROSS, device="cuda"))


@pytest.mark.cuda
def test_float32_stays_ieee_on_cuda_where_tf32_is_allowed():
    torch.set_float32_matmul_precision("high")
    try:
        _check(Case(query_lens=(300, 1), seq_lens=(300, 900), head_size=128, device="cuda"))
    finally:
        torch.set_float32_matmul_precision("highest")
