from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_conformance._layer_checks import check_call, check_layer, check_step
from attn_conformance.batch import Batch, make_batch
from attn_conformance.case import Case
from attn_conformance.reference_backend import REFERENCE_CAPABILITY
from attn_shared.errors import InvalidInputError, InvalidRequestError
from attn_shared.request import AttentionType

CASE = Case(name="c", query_lens=(1, 5), seq_lens=(9, 5))


def call(batch: Batch, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "query": batch.query,
        "key": batch.key,
        "value": batch.value,
        "kv_cache": batch.kv_cache,
        "common": batch.common,
        "output": None,
        "lse": None,
        **changes,
    }
    check_call(batch.spec, batch.layer, **arguments)


def test_a_right_call_passes() -> None:
    batch = make_batch(CASE)
    call(batch)
    call(batch, output=torch.empty(6, 4, 16), lse=torch.empty(4, 6))
    call(batch, key=None, value=None)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query shape", {"query": torch.empty(6, 4, 17)}),
        ("query shape", {"query": torch.empty(6, 64)}),
        ("query dtype", {"query": torch.empty(6, 4, 16, dtype=torch.float16)}),
        ("query rows", {"query": torch.empty(5, 4, 16)}),
        ("query device", {"query": torch.empty(6, 4, 16, device="meta")}),
        ("key shape", {"key": torch.empty(6, 4, 16)}),
        ("value shape", {"value": torch.empty(6, 2, 8)}),
        ("value", {"value": None}),
        ("key", {"key": None}),
        ("output shape", {"output": torch.empty(5, 4, 16)}),
        ("output dtype", {"output": torch.empty(6, 4, 16, dtype=torch.float64)}),
        ("lse shape", {"lse": torch.empty(6, 4)}),
        ("lse dtype", {"lse": torch.empty(4, 6, dtype=torch.float64)}),
        ("kv_cache", {"kv_cache": None}),
        ("kv_cache shape", {"kv_cache": torch.empty(3, 2, 4, 2, 17)}),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name} is "):
        call(make_batch(CASE), **change)


def test_a_scale_of_an_unquantised_cache_is_refused() -> None:
    batch = make_batch(CASE)
    batch.layer.v_scale = torch.tensor([2.0])
    with pytest.raises(InvalidInputError, match="v_scale"):
        call(batch)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_what_a_layer_has_and_does_not_declare_is_refused_and_the_reverse(name: str) -> None:
    plain = make_batch(CASE)
    setattr(plain.layer, name, torch.zeros(4))
    with pytest.raises(InvalidInputError, match=name):
        call(plain)
    declared = make_batch(CASE.with_fields(has_sinks=True, has_alibi=True))
    setattr(declared.layer, name, None)
    with pytest.raises(InvalidInputError, match=name):
        call(declared)


def test_an_encoder_needs_keys() -> None:
    batch = make_batch(CASE.with_fields(seq_lens=(1, 5), attn_type=AttentionType.ENCODER))
    call(batch)
    with pytest.raises(InvalidInputError, match=r"^key is None"):
        call(batch, key=None, value=None)


def test_a_batch_without_a_table_is_refused_where_there_is_a_cache() -> None:
    batch = make_batch(CASE)
    check_step("R", REFERENCE_CAPABILITY, batch.spec, batch.common)
    with pytest.raises(InvalidInputError, match="block_table"):
        check_step(
            "R", REFERENCE_CAPABILITY, batch.spec, batch.common.with_fields(block_table=None)
        )


@pytest.mark.parametrize("fields", [{"softcap": 0.0}, {"window": (-1, 0)}, {"num_heads": 5}])
def test_a_layer_that_nobody_may_make_is_refused(fields: dict[str, Any]) -> None:
    spec = replace(make_batch(CASE).spec, **fields)
    with pytest.raises(InvalidRequestError):
        check_layer("R", REFERENCE_CAPABILITY, spec)
