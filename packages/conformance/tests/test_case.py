from __future__ import annotations

import pytest
import torch

from attn_conformance.case import Case, TableStyle
from attn_shared.errors import InvalidRequestError
from attn_shared.request import AttentionType, Phase


def case(**fields: object) -> Case:
    return Case(**{"name": "c", "query_lens": (1, 5), "seq_lens": (9, 5), **fields})  # type: ignore[arg-type]


def test_reads_as_the_call_that_makes_it_again() -> None:
    made = case(dtype=torch.bfloat16, table=TableStyle.REPEATED, window=(3, 0))
    assert str(made) == (
        "Case(name='c', query_lens=(1, 5), seq_lens=(9, 5), dtype=bfloat16, window=(3, 0), "
        "table='repeated')"
    )


def test_multimodal_ranges_are_shown_when_there_are_any() -> None:
    assert "mm_prefix" not in str(case())
    assert "mm_prefix_ranges={0: ((1, 3),)}" in str(case(mm_prefix_ranges={0: ((1, 3),)}))


def test_the_request_asks_for_what_the_batch_has() -> None:
    request = case(
        causal=(True, False),
        has_sinks=True,
        kv_cache_dtype="fp8",
        k_scale=(0.5, 2.0),
        mm_prefix_ranges={0: ((1, 3),)},
    ).request
    assert request.per_request_causal
    assert not request.non_causal
    assert request.has_sinks
    assert request.per_head_quant_scales
    assert request.use_mm_prefix


def test_only_decoders_are_non_causal_by_choice() -> None:
    assert case(causal=False).request.non_causal
    assert not case(causal=False, attn_type=AttentionType.ENCODER).request.non_causal


def test_a_request_that_nobody_may_make_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="softcap"):
        _ = case(softcap=0.0).request


@pytest.mark.parametrize(
    ("query_lens", "phase"),
    [((1, 1, 0), Phase.DECODE), ((5, 2), Phase.PREFILL), ((1, 5), Phase.MIXED)],
)
def test_phase(query_lens: tuple[int, ...], phase: Phase) -> None:
    lens = tuple(9 for _ in query_lens)
    assert case(query_lens=query_lens, seq_lens=lens).phase is phase


def test_what_the_cache_holds_before_the_step() -> None:
    assert case().computed_lens == (8, 0)
    assert case(writes=False).computed_lens == (9, 5)
    assert case(seq_lens=(9, 0)).computed_lens == (8, 0)
    assert case(attn_type=AttentionType.ENCODER_DECODER).computed_lens == (0, 0)
