from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matrix_testing import ALL, BARE, question, without, witness_of

from attn_cli.matrix.answers import Answer, Cell
from attn_cli.matrix.questions import PLAIN
from attn_shared.capability import Capability, DeviceLimit, Reason, Rule, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.request import AttentionRequest, AttentionType, Phase
from attn_shared.selection import Verdict, VerdictStatus


def asked(ability: Any, key: str, device: str = "h200") -> Cell:
    """What a backend answers to one question."""
    witness = witness_of(ability, device)
    return witness.ask(question(key), witness.plain_request()[0])


def test_yes_slow_and_no_with_the_limit() -> None:
    assert asked(ALL, "softcap") == Cell(answer=Answer.YES)
    slow = asked(without("softcap", Support.SLOW), "softcap")
    assert slow == Cell(answer=Answer.SLOW, detail="slow path for softcap")
    refused = asked(without("softcap"), "softcap")
    assert refused.answer is Answer.NO
    assert refused.why() == "softcap=30.0 (allowed: None)"


def test_the_best_way_to_ask_counts() -> None:
    bidirectional = replace(without("non_causal"), attn_types=frozenset(AttentionType))
    assert asked(bidirectional, "two_sided_window").answer is Answer.YES
    decoders = replace(without("non_causal"), attn_types=frozenset({AttentionType.DECODER}))
    assert asked(decoders, "two_sided_window").why() == "non_causal=True (allowed: False)"


def test_a_quantised_cache_of_any_kind_shows_scales_per_head() -> None:
    e5m2 = replace(ALL, kv_cache_dtypes=frozenset({"auto", "fp8_e5m2"}))
    assert asked(e5m2, "per_head_quant_scales").answer is Answer.YES
    plain = replace(ALL, kv_cache_dtypes=frozenset({"auto"}))
    assert asked(plain, "per_head_quant_scales").why() == "kv_cache_dtype=fp8 (allowed: auto)"


def test_a_rule_refuses_in_its_own_words() -> None:
    def odd(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        if request.queries_per_kv % 2 == 0:
            return None
        return Reason(code="ratio", value=str(request.queries_per_kv), allowed="even ones")

    ruled = replace(ALL, rules=(Rule(name="even_ratio", check=odd),))
    assert asked(ruled, "queries_per_kv=6").answer is Answer.YES
    assert asked(ruled, "queries_per_kv=5").why() == "ratio=5 (allowed: even ones)"
    assert witness_of(ruled).rules() == ("even_ratio",)


def test_a_capability_that_raises_is_contained() -> None:
    def broken(_device: DeviceFacts) -> Capability:
        raise RuntimeError("out of luck")

    cell = asked(broken, "softcap")
    assert cell.answer is Answer.UNAVAILABLE
    assert "out of luck" in cell.why()
    assert witness_of(broken).rules() == ()


@pytest.mark.parametrize(
    ("capability", "plain"),
    [
        pytest.param(replace(BARE, phases=frozenset({Phase.DECODE})), "phase", id="decode"),
        pytest.param(replace(BARE, head_sizes=SizeSet.of(256)), "head_size", id="one-width"),
        pytest.param(replace(BARE, kv_cache_dtypes=frozenset({"fp8"})), "cache", id="fp8"),
        pytest.param(
            replace(BARE, attn_types=frozenset({AttentionType.ENCODER_ONLY}), block_sizes=()),
            "encoder",
            id="no-cache",
        ),
        pytest.param(
            replace(BARE, is_mla=True, head_sizes=SizeSet.of(576)), "latent", id="latents"
        ),
    ],
)
def test_a_backend_is_asked_about_what_it_is_for(capability: Capability, plain: str) -> None:
    request, verdict = witness_of(capability).plain_request()
    assert verdict.status is VerdictStatus.ELIGIBLE
    assert {
        "phase": request.phase is Phase.DECODE,
        "head_size": request.head_size == 256,
        "cache": request.kv_cache_dtype == "fp8",
        "encoder": request.is_cache_free,
        "latent": request.use_mla,
    }[plain]


def test_a_backend_that_serves_nothing_plain_says_why_in_the_fewest_reasons() -> None:
    nothing = replace(BARE, head_sizes=SizeSet.of(7))
    request, verdict = witness_of(nothing).plain_request()
    assert request == PLAIN
    assert [str(reason) for reason in verdict.reasons] == ["head_size=128 (allowed: 7)"]


def test_a_refused_device_is_the_end_of_the_search() -> None:
    nvidia = replace(BARE, devices=(DeviceLimit(vendor=Vendor.NVIDIA),))
    request, verdict = witness_of(nvidia, "mi300x").plain_request()
    assert request == PLAIN
    assert Cell.of(verdict).refuses_device
    assert not Cell.of(witness_of(nvidia).plain_request()[1]).refuses_device


def test_what_nobody_can_ask_is_no_question() -> None:
    latents = replace(BARE, is_mla=True, head_sizes=SizeSet.of(576))
    assert asked(latents, "head_size=64").answer is Answer.NO_QUESTION
    assert asked(latents, "kind=ordinary").answer is Answer.NO
    cache_free = replace(BARE, attn_types=frozenset({AttentionType.ENCODER_ONLY}), block_sizes=())
    assert asked(cache_free, "block_size=16").answer is Answer.NO_QUESTION
    assert asked(cache_free, "kv_cache_dtype=fp8").answer is Answer.NO_QUESTION


def test_an_unprobed_library_leaves_the_answer_open() -> None:
    verdict = Verdict(name="X", status=VerdictStatus.UNKNOWN, detail="ask again")
    assert Cell.of(verdict) == Cell(answer=Answer.UNKNOWN, detail="ask again")
    assert not Cell.of(verdict).answer.is_served


def test_cells_are_equal_whatever_device_a_limit_names() -> None:
    def refused(value: str, allowed: str = "amd") -> Cell:
        return Cell(
            answer=Answer.NO, reasons=(Reason(code="device", value=value, allowed=allowed),)
        )

    assert refused("nvidia sm_90").essence == refused("intel bmg").essence
    assert refused("nvidia sm_90").essence != refused("nvidia sm_90", "cpu").essence
    assert refused("x").essence != Cell(answer=Answer.NO).essence


def test_a_cell_as_json_leaves_out_what_is_empty() -> None:
    assert Cell(answer=Answer.YES).to_dict() == {"answer": "yes"}
    reason = Reason(code="dcp", value="2", allowed="1")
    assert Cell(answer=Answer.NO, reasons=(reason,)).to_dict() == {
        "answer": "no",
        "reasons": [{"code": "dcp", "value": "2", "allowed": "1", "hint": ""}],
    }
    assert Cell(answer=Answer.SLOW, detail="d").to_dict() == {"answer": "slow", "detail": "d"}
