"""Calls that do not fit are refused before any kernel runs; `CallChecker` has tests of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attn_torch_testing import Batch, Case

from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig
from attn_torch.backends.torch_sdpa import TorchSDPAImpl, TorchSDPAMetadataBuilder

CPU = torch.device("cpu")
META = torch.device("meta")
BATCH = Case(query_lens=(1, 3), seq_lens=(9, 5), head_size_v=8).build()
LENS = (2, 3)
ENCODERS = Case(query_lens=LENS, seq_lens=LENS, attn_type=AttentionType.ENCODER).build()


def _metadata(batch: Batch):
    builder = TorchSDPAMetadataBuilder(
        batch.spec.kv_cache_spec, {"layer": batch.spec}, BuildConfig(), CPU
    )
    return builder.build(0, batch.common)


def _forward(batch: Batch = BATCH, **changes):
    arguments = {
        "layer": batch.layer,
        "query": batch.query,
        "key": batch.key,
        "value": batch.value,
        "kv_cache": batch.kv_cache,
        "metadata": _metadata(batch),
    }
    return TorchSDPAImpl(batch.spec).forward(**(arguments | changes))


def _layer(**changes) -> SimpleNamespace:
    return SimpleNamespace(**(vars(BATCH.layer) | changes))


QUERY, CACHE = BATCH.query, BATCH.kv_cache
assert CACHE is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": QUERY[:, :2]}, r"query shape is \(4, 2, 16\); allowed: \(T, 4, 16\)"),
        ({"query": QUERY[:3]}, "query rows is 3; allowed: at least 4"),
        ({"output": QUERY}, r"output shape is \(4, 4, 16\); allowed: \(4, 4, 8\)"),
        ({"lse": torch.zeros(4, 3)}, r"lse shape is \(4, 3\); allowed: \(4, 4\)"),
        ({"kv_cache": None}, "kv_cache is None"),
        ({"key": torch.zeros(4, 2, 16)}, "value is None; allowed: a tensor where the other is one"),
        ({"kv_cache": CACHE[:, :3]}, r"kv_cache shape is .*num_blocks, 4, 2, 24"),
        ({"kv_cache": CACHE.half()}, "kv_cache dtype is float16; allowed: float32"),
        ({"kv_cache": CACHE.to(META)}, "kv_cache device is meta; allowed: cpu"),
        ({"metadata": object()}, "metadata is a object; allowed: a TorchSDPAMetadata"),
    ],
)
def test_tensors_of_another_layer_or_batch(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        _forward(**changes)


def test_nothing_is_written_where_a_call_is_refused():
    output = torch.full((4, 4, 8), 7.0)
    with pytest.raises(InvalidInputError, match="lse"):
        _forward(output=output, lse=torch.zeros(1))
    assert (output == 7.0).all()


def test_metadata_of_a_longer_batch_is_refused():
    longer = Case(query_lens=(1, 9), seq_lens=(9, 9), head_size_v=8).build()
    with pytest.raises(InvalidInputError, match="query rows is 4; allowed: at least 10"):
        _forward(metadata=_metadata(longer))


def test_metadata_that_was_not_planned_for_the_layers_window_is_refused():
    windowed = BATCH.case.with_fields(window=(2, 0)).build()
    with pytest.raises(InvalidInputError, match=r"metadata is planned for .*window=\(2, 0\)"):
        _forward(metadata=_metadata(windowed))


def test_metadata_of_the_other_kind_of_attention_is_refused():
    with pytest.raises(InvalidInputError, match="planned without a block table"):
        _forward(query=torch.zeros(5, 4, 16), metadata=_metadata(ENCODERS))
    keys = {"key": torch.zeros(14, 2, 16), "value": torch.zeros(14, 2, 16)}
    with pytest.raises(InvalidInputError, match="planned over a cache"):
        _forward(ENCODERS, metadata=_metadata(BATCH), **keys)


KEYS = ENCODERS.key
assert KEYS is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": None}, r"key shape is None; allowed: \(at least 5, 2, 16\) with encoder"),
        ({"value": KEYS[:4]}, r"value shape is \(4, 2, 16\)"),
        ({"kv_cache": CACHE}, "kv_cache is a tensor .* allowed: None with encoder"),
    ],
)
def test_keys_that_do_not_come_with_the_call(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        _forward(ENCODERS, **changes)


def test_options_of_the_layer_object_that_it_was_not_described_with():
    with pytest.raises(UnsupportedOptionError, match=r"layer\.sinks is given.*has_sinks=False"):
        _forward(layer=_layer(sinks=torch.zeros(4)))
    with pytest.raises(UnsupportedOptionError, match=r"layer\.v_scale=0.5 .* no such scale"):
        _forward(layer=_layer(v_scale=0.5))


def test_a_cache_in_the_other_fp8_flavour_is_refused():
    fnuz = BATCH.case.with_fields(
        kv_cache_dtype="fp8", fp8_e4m3_dtype=torch.float8_e4m3fnuz, layout=KVCacheLayout.HND
    ).build()
    fn = fnuz.case.with_fields(fp8_e4m3_dtype=torch.float8_e4m3fn).build()
    with pytest.raises(InvalidInputError, match="float8_e4m3fn; allowed: float8_e4m3fnuz"):
        _forward(fnuz, kv_cache=fn.kv_cache)
