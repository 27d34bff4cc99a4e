from __future__ import annotations

from collections import Counter

import pytest
from matrix_testing import ALL, BARE, FEATURES, without

from attn_cli.matrix.questions import PLAIN, QUESTIONS, Topic, axes_of, plain_requests
from attn_shared.device import resolve_device
from attn_shared.dtypes import KV_CACHE_DTYPES
from attn_shared.errors import InvalidRequestError
from attn_shared.request import AttentionRequest, AttentionType, Phase

H200 = resolve_device("h200")
BY_KEY = {question.key: question for question in QUESTIONS}


def test_keys_are_unique() -> None:
    assert len(BY_KEY) == len(QUESTIONS)


def test_every_feature_of_a_capability_is_asked_for() -> None:
    assert set(FEATURES) <= set(BY_KEY)


@pytest.mark.parametrize("code", FEATURES)
def test_a_question_asks_for_its_feature_and_for_no_other(code: str) -> None:
    (usual, *others) = BY_KEY[code].ways
    request = PLAIN.with_options(**usual)
    assert ALL.check(request, H200) == ()
    assert [reason.code for reason in without(code).check(request, H200)] == [code]
    for way in others:
        refused = without(code).check(PLAIN.with_options(**way), H200)
        assert [reason.code for reason in refused] == [code]


def test_every_format_kind_and_phase_is_asked_for() -> None:
    values = {axis: {q.value for q in QUESTIONS if q.axis == axis} for axis in _axes()}
    assert values["kv_cache_dtype"] == set(KV_CACHE_DTYPES)
    assert values["attn_type"] == set(map(str, AttentionType))
    assert values["phase"] == set(map(str, Phase))
    assert values["dtype"] == {"bfloat16", "float16", "float32"}
    assert values["kv_layout"] == {"NHD", "HND"}


def _axes() -> set[str]:
    return {question.axis for question in QUESTIONS}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("head_size=80", {"head_size": 80}),
        ("head_size_v=192/128", {"head_size": 192, "head_size_v": 128}),
        ("block_size=24", {"block_size": 24}),
        ("queries_per_kv=5", {"queries_per_kv": 5}),
        ("kind=MLA", {"head_size": 576, "value_size": 512, "num_kv_heads": 1, "use_mla": True}),
        ("kind=sparse", {"use_mla": False, "use_sparse": True, "index_topk": 2048}),
        ("window", {"window": (1023, 0), "is_causal": True, "has_right_window": False}),
        ("dcp", {"dcp_size": 2}),
    ],
)
def test_what_a_question_changes(key: str, expected: dict[str, object]) -> None:
    request = PLAIN.with_options(**BY_KEY[key].ways[0])
    assert {name: getattr(request, name) for name in expected} == expected


def test_kinds_are_asked_in_full_whatever_the_plain_request_is() -> None:
    kinds = [question.ways[0] for question in QUESTIONS if question.axis == "kind"]
    answers = {
        AttentionRequest(num_heads=1, num_kv_heads=1, head_size=8).with_options(**kind)
        for kind in kinds
    }
    latent = PLAIN.with_options(**kinds[1])
    assert {latent.with_options(**kind) for kind in kinds} == answers


def test_plain_requests_begin_with_the_plainest_and_ask_for_no_feature() -> None:
    requests = list(plain_requests())
    assert requests[0] == PLAIN
    assert Counter(requests).most_common(1)[0][1] == 1
    ordinary = [r for r in requests if BARE.check(r, H200) == ()]
    assert {r.phase for r in ordinary} == set(Phase)
    codes = {reason.code for request in requests for reason in BARE.check(request, H200)}
    assert codes.isdisjoint(FEATURES)


def test_plain_requests_reach_every_kind() -> None:
    found = {(r.use_mla, r.use_sparse, r.is_cache_free) for r in plain_requests()}
    assert found >= {
        (False, False, False),
        (False, False, True),
        (True, False, False),
        (True, True, False),
        (False, True, False),
    }


def test_axes_are_given_by_topic_in_order() -> None:
    assert list(axes_of(Topic.LOGITS, QUESTIONS)) == ["sink", "softcap", "alibi", "lse"]
    assert [q.value for q in axes_of(Topic.KINDS, QUESTIONS)["phase"]] == list(Phase)
    assert sum(len(axes_of(topic, QUESTIONS)) for topic in Topic) == len(_axes())


def test_a_width_is_no_question_for_latents() -> None:
    latent = PLAIN.with_options(**BY_KEY["kind=MLA"].ways[0])
    with pytest.raises(InvalidRequestError, match="head_size"):
        latent.with_options(**BY_KEY["head_size=64"].ways[0])
