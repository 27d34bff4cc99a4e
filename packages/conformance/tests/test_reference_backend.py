from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_conformance.batch import Batch, make_batch
from attn_conformance.case import Case
from attn_conformance.engine import Engine
from attn_conformance.reference_backend import (
    REFERENCE_CAPABILITY,
    ReferenceBackend,
    ReferenceBuilder,
    ReferenceImpl,
    ReferenceMetadata,
)
from attn_shared.errors import AttnError, InvalidInputError, MetadataError, UnsupportedOptionError
from attn_shared.registry import api_problem
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig

CASE = Case(name="c", query_lens=(1, 5), seq_lens=(9, 5), num_padding_rows=1)


def engine_of(batch: Batch, backend: type[ReferenceBackend] = ReferenceBackend) -> Engine:
    return Engine.of(backend, batch, BuildConfig())


def test_is_a_backend_that_a_registry_would_take() -> None:
    assert api_problem(ReferenceBackend.attn_api) is None
    assert ReferenceBackend.get_impl_cls() is ReferenceImpl
    assert ReferenceBackend.get_builder_cls() is ReferenceBuilder


def test_a_subclass_has_an_implementation_that_knows_it() -> None:
    class Mine(ReferenceImpl):
        pass

    class Backend(ReferenceBackend):
        name = "MINE"
        impl = Mine

    impl = Backend.get_impl_cls()
    assert issubclass(impl, Mine)
    assert impl.backend is Backend  # type: ignore[attr-defined]
    assert Backend.get_builder_cls().backend is Backend  # type: ignore[attr-defined]
    assert ReferenceImpl.backend is ReferenceBackend


def test_two_equal_keys_give_the_mean_of_their_values() -> None:
    """By hand: equal logits weigh one half each, and the LSE is logit + log 2."""
    batch = make_batch(
        Case(name="c", query_lens=(1,), seq_lens=(2,), num_heads=1, num_kv_heads=1, scale=1.0)
    )
    assert batch.kv_cache is not None
    assert batch.key is not None
    assert batch.value is not None
    engine = engine_of(batch)
    engine.write(batch)
    views = batch.spec.kv_cache_spec.split(batch.kv_cache)  # type: ignore[union-attr]
    row = int(batch.common.block_table[0, 0])  # type: ignore[index]
    views.key[row, 0] = batch.key[0]
    views.value[row, 0] = 3 * batch.value[0]
    result = engine.forward(batch, engine.plan(batch), with_lse=True)
    assert torch.allclose(result.output[0], 2 * batch.value[0])
    logit = float(batch.query[0, 0].double() @ batch.key[0, 0].double())
    assert result.lse is not None
    assert float(result.lse[0, 0]) == pytest.approx(logit + 0.6931472, abs=1e-5)


def test_rows_of_padding_are_left_alone() -> None:
    batch = make_batch(CASE)
    output = torch.full((7, 4, 16), 7.0)
    engine = engine_of(batch)
    engine.write(batch)
    engine.forward(batch, engine.plan(batch), output=output)
    assert bool((output[6] == 7).all())


def test_what_the_capability_does_not_serve_is_refused_in_layer_and_batch() -> None:
    from dataclasses import replace

    from attn_shared.capability import Support

    class Narrow(ReferenceBackend):
        name = "NARROW"
        served = replace(REFERENCE_CAPABILITY, softcap=Support.NO, non_causal=Support.NO)

    with pytest.raises(UnsupportedOptionError, match=r"softcap=2\.0"):
        engine_of(make_batch(CASE.with_fields(softcap=2.0)), Narrow)
    batch = make_batch(CASE.with_fields(causal=False))
    with pytest.raises(UnsupportedOptionError, match="non_causal=True"):
        engine_of(batch, Narrow).plan(batch)


def test_a_prefix_that_is_not_shared_is_refused() -> None:
    batch = make_batch(Case(name="c", query_lens=(1, 1), seq_lens=(9, 9)))
    with pytest.raises(MetadataError, match="common_prefix_len"):
        engine_of(batch).builder.build(4, batch.common)


def forward(batch: Batch, **changes: Any) -> torch.Tensor:
    arguments = {
        "layer": batch.layer,
        "query": batch.query,
        "key": batch.key,
        "value": batch.value,
        "kv_cache": batch.kv_cache,
        "metadata": ReferenceMetadata(common=batch.common),
    }
    return ReferenceImpl(batch.spec).forward(**(arguments | changes))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query rows", {"query": torch.empty(5, 4, 16)}),
        ("query device", {"query": torch.empty(7, 4, 16, device="meta")}),
        ("output dtype", {"output": torch.empty(7, 4, 16, dtype=torch.float64)}),
        ("lse shape", {"lse": torch.empty(7, 4)}),
        ("value shape", {"value": torch.empty(7, 2, 8)}),
        ("value", {"value": None}),
        ("kv_cache", {"kv_cache": None}),
        ("kv_cache shape", {"kv_cache": torch.empty(3, 2, 4, 2, 17)}),
    ],
)
def test_a_call_that_does_not_fit_is_refused_by_name(name: str, change: dict[str, Any]) -> None:
    batch = make_batch(CASE)
    forward(batch)
    with pytest.raises(InvalidInputError, match=f"^{name} is "):
        forward(batch, **change)


@pytest.mark.parametrize("option", ["sinks", "alibi_slopes", "v_scale"])
def test_an_option_of_the_layer_object_that_would_be_dropped_is_refused(option: str) -> None:
    batch = make_batch(CASE)
    setattr(batch.layer, option, torch.full((4,), 2.0))
    with pytest.raises(AttnError, match=rf"layer\.{option}"):
        forward(batch)


def test_an_encoder_needs_keys() -> None:
    batch = make_batch(
        CASE.with_fields(seq_lens=(1, 5), attn_type=AttentionType.ENCODER, num_padding_rows=0)
    )
    forward(batch)
    with pytest.raises(InvalidInputError, match=r"^key shape is None"):
        forward(batch, key=None, value=None)
