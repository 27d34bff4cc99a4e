from __future__ import annotations

import json
from typing import Any

import pytest
from attn_shared_fakes import GPU, backend, request

from attn_shared.capability import Reason
from attn_shared.device import DeviceFacts, preset
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError, NoBackendError, UnknownNameError
from attn_shared.selection import (
    SCHEMA_VERSION,
    DecidedBy,
    Policy,
    Selection,
    Verdict,
    VerdictStatus,
)

FAST = Verdict(
    name="FAST",
    status=VerdictStatus.CHOSEN,
    priority=300,
    provenance="measured on a GPU",
    kv_layout=KVCacheLayout.HND,
    block_size=32,
)
NARROW = Verdict(
    name="NARROW",
    status=VerdictStatus.REJECTED,
    priority=200,
    provenance="a rule",
    reasons=(
        Reason(code="head_size", value="64", allowed="128"),
        Reason(code="sink", value="True", allowed="False", hint="drop the sinks"),
    ),
)
GONE = Verdict(
    name="GONE", status=VerdictStatus.UNAVAILABLE, detail="gone is not installed; pip install gone"
)


def selection(device: DeviceFacts = GPU, **options: Any) -> Selection:
    plain: dict[str, Any] = {
        "request": request(),
        "device": device,
        "policy": Policy(),
        "chosen": "FAST",
        "backend": backend("FAST"),
        "kv_layout": KVCacheLayout.HND,
        "block_size": 32,
        "decided_by": DecidedBy.DEFAULT,
        "verdicts": (FAST, NARROW, GONE),
    }
    return Selection(**{**plain, **options})


@pytest.mark.parametrize("word", ["auto", "AUTO", "Auto", None])
def test_auto_names_nothing(word: str | None) -> None:
    assert Policy(backend=word) == Policy()
    assert Policy(backend=word).named() == (None, DecidedBy.DEFAULT)


def test_the_model_binds_before_the_user() -> None:
    assert Policy(backend="A").named() == ("A", DecidedBy.USER)
    assert Policy(backend="A", required="B").named() == ("B", DecidedBy.MODEL)
    assert Policy(measured=("A",)).named() == (None, DecidedBy.DEFAULT)


@pytest.mark.parametrize(
    ("verdict", "summary"),
    [
        (FAST, "priority 300: measured on a GPU"),
        (
            NARROW,
            "head_size=64 (allowed: 128); sink=True (allowed: False); drop the sinks",
        ),
        (GONE, "gone is not installed; pip install gone"),
        (Verdict(name="X", status=VerdictStatus.ELIGIBLE), "taken by name only"),
        (
            Verdict(name="X", status=VerdictStatus.ELIGIBLE, provenance="of attn-x 1.0"),
            "taken by name only: of attn-x 1.0",
        ),
        (
            Verdict(
                name="X",
                status=VerdictStatus.ELIGIBLE,
                priority=0,
                slow_features=("sink", "softcap"),
            ),
            "priority 0; slow path for sink, softcap",
        ),
    ],
)
def test_a_verdict_says_why_in_one_line(verdict: Verdict, summary: str) -> None:
    assert verdict.summary() == summary


def test_a_verdict_is_json_safe() -> None:
    assert json.loads(json.dumps(FAST.to_dict())) == {
        "name": "FAST",
        "status": "chosen",
        "priority": 300,
        "provenance": "measured on a GPU",
        "reasons": [],
        "detail": "",
        "slow_features": [],
        "is_preferred": False,
        "needs_probe": [],
        "kv_layout": "HND",
        "block_size": 32,
        "paths": [],
    }
    assert json.loads(json.dumps(NARROW.to_dict()))["reasons"][1] == {
        "code": "sink",
        "value": "True",
        "allowed": "False",
        "hint": "drop the sinks",
    }


def test_a_selection_reads_as_a_table() -> None:
    assert str(selection(failures=("X = x:X (attn-x 1.0): OSError: no",))).split("\n") == [
        (
            "FAST chosen by default for NVIDIA Fake (sm_90), block_size=32, kv_layout=HND; "
            "rejected: NARROW"
        ),
        "FAST    chosen       priority 300: measured on a GPU",
        (
            "NARROW  rejected     head_size=64 (allowed: 128); sink=True (allowed: False); "
            "drop the sinks"
        ),
        "GONE    unavailable  gone is not installed; pip install gone",
        "nearest: GONE; to get it: gone is not installed; pip install gone",
        "note: plugin failed: X = x:X (attn-x 1.0): OSError: no",
    ]


def test_a_selection_of_nothing_says_so() -> None:
    nothing = selection(chosen=None, backend=None, verdicts=())
    assert str(nothing).split("\n") == ["nothing chosen for NVIDIA Fake", ""]
    with pytest.raises(NoBackendError) as caught:
        _ = nothing.backend_cls
    assert caught.value.selection is nothing


def test_the_chosen_class_is_there() -> None:
    assert selection().backend_cls.get_name() == "FAST"


def test_a_verdict_by_name() -> None:
    assert selection().verdict("GONE") is GONE
    with pytest.raises(UnknownNameError, match="unknown candidate 'fast'; allowed: FAST, GONE, NA"):
        selection().verdict("fast")


def eligible(name: str, priority: int | None, **more: Any) -> Verdict:
    return Verdict(name=name, status=VerdictStatus.ELIGIBLE, priority=priority, **more)


class TestAlternatives:
    def test_the_highest_ranked_of_the_others_comes_next(self) -> None:
        found = selection(verdicts=(FAST, NARROW, eligible("LOW", 10), eligible("HIGH", 90), GONE))
        runner_up = found.runner_up()
        assert runner_up is not None
        assert (runner_up.name, runner_up.steps()) == ("HIGH", ("name it: backend='HIGH'",))
        assert "next: HIGH; to get it: name it: backend='HIGH'" in found.explain()

    def test_a_slow_path_comes_after_all_that_need_none(self) -> None:
        slow = eligible("SLOW", 200, slow_features=("softcap",))
        found = selection(verdicts=(FAST, slow, eligible("LOW", 10))).runner_up()
        assert found is not None
        assert found.name == "LOW"

    def test_a_measured_one_comes_before_the_default_order(self) -> None:
        verdicts = (FAST, eligible("HIGH", 90), eligible("LOW", 10))
        policy = Policy(measured=("FAST", "LOW", "HIGH"))
        found = selection(verdicts=verdicts, policy=policy).runner_up()
        assert found is not None
        assert found.name == "LOW"

    def test_one_by_name_only_comes_after_those_with_a_rank(self) -> None:
        found = selection(verdicts=(FAST, eligible("NAMED", None))).runner_up()
        assert found is not None
        assert found.name == "NAMED"

    def test_without_another_that_serves_it_is_the_one_least_in_the_way(self) -> None:
        found = selection().runner_up()  # one library is missing against two reasons
        assert found is GONE
        assert selection(verdicts=(FAST,)).runner_up() is None

    def test_what_it_would_take_names_what_is_allowed(self) -> None:
        assert NARROW.steps() == (
            "head_size 128 instead of 64",
            "sink False instead of True (drop the sinks)",
        )
        assert (FAST.steps(), GONE.steps()) == (
            (),
            ("gone is not installed; pip install gone",),
        )

    def test_ahead_are_those_that_auto_would_take_first(self) -> None:
        best = Verdict(name="BEST", status=VerdictStatus.UNAVAILABLE, priority=400, detail="absent")
        found = selection(verdicts=(best, FAST, NARROW, GONE))
        assert found.ahead() == (best,)  # NARROW ranks lower, GONE has no rank
        assert "before it: BEST; to get it: absent" in found.explain()
        assert selection().ahead() == ()

    def test_where_nothing_is_chosen_all_that_have_a_rank_are_ahead(self) -> None:
        found = selection(chosen=None, backend=None, verdicts=(NARROW, GONE))
        assert found.ahead() == (NARROW,)
        assert "before it" not in found.explain()

    def test_they_are_in_the_json(self) -> None:
        record = selection(verdicts=(FAST, eligible("LOW", 10))).to_dict()
        assert record["runner_up"] == {
            "name": "LOW",
            "status": "eligible",
            "steps": ["name it: backend='LOW'"],
        }
        assert record["ahead"] == []


def test_a_simulated_device_is_said_to_be_one() -> None:
    notes = selection(preset("h200")).notes()
    assert any("every vendor library is assumed installed" in note for note in notes)
    assert not any("assumed" in note for note in selection().notes())


def test_who_named_a_backend_is_said() -> None:
    named = selection(
        policy=Policy(backend="FAST", source="environment variable ATTN_BACKEND"),
        decided_by=DecidedBy.USER,
    )
    assert named.notes() == ("FAST was named by environment variable ATTN_BACKEND",)


def test_a_name_that_the_model_overrules_is_said() -> None:
    overruled = selection(
        policy=Policy(required="FAST", backend="NARROW"), decided_by=DecidedBy.MODEL
    )
    assert overruled.notes() == (
        "NARROW was named by argument, and is overruled: the model runs on FAST only",
    )
    agreed = selection(policy=Policy(required="FAST", backend="FAST"), decided_by=DecidedBy.MODEL)
    assert agreed.notes() == ()


def test_a_selection_is_json_safe_with_a_schema_version() -> None:
    record = json.loads(json.dumps(selection(failures=("X failed",)).to_dict()))
    assert record["schema_version"] == SCHEMA_VERSION == 1
    assert record["chosen"] == "FAST"
    assert record["kv_layout"] == "HND"
    assert record["block_size"] == 32
    assert record["decided_by"] == "default"
    assert [verdict["status"] for verdict in record["verdicts"]] == [
        "chosen",
        "rejected",
        "unavailable",
    ]
    assert record["request"]["head_size"] == 64
    assert record["device"]["name"] == "NVIDIA Fake"
    assert record["notes"] == ["plugin failed: X failed"]
    assert record["failures"] == ["X failed"]
    nothing = selection(chosen=None, backend=None, kv_layout=None, block_size=None).to_dict()
    assert nothing["chosen"] is nothing["kv_layout"] is nothing["block_size"] is None


def test_a_library_cannot_be_preferred_and_avoided() -> None:
    with pytest.raises(InvalidInputError, match="prefer is a; allowed: libraries that are not"):
        Policy(prefer=("a", "b"), avoid=("a",))


@pytest.mark.parametrize("field", ["prefer", "avoid"])
def test_libraries_are_a_tuple_of_names(field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{field} is 'aiter'; allowed: a tuple of names"):
        Policy(**{field: "aiter"})  # type: ignore[arg-type]
