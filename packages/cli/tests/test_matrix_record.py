from __future__ import annotations

import json
from dataclasses import replace

from matrix_testing import ALL, BARE, matrix_of, run_of, without

from attn_cli.matrix.questions import QUESTIONS
from attn_cli.matrix.record import matrix_record
from attn_shared.capability import DeviceLimit, Rule, Support
from attn_shared.device import Vendor


def test_the_record_is_json_with_a_version() -> None:
    record = matrix_record(matrix_of("h200", "spr", FAKE=ALL))
    assert json.loads(json.dumps(record)) == record
    assert record["schema_version"] == 1
    assert [device["name"] for device in record["devices"]] == ["h200", "spr"]
    assert record["devices"][0] == {
        "name": "h200",
        "device": "NVIDIA H200",
        "vendor": "nvidia",
        "family": "hopper",
        "arch": "sm_90",
        "is_simulated": True,
    }


def test_questions_say_what_they_ask() -> None:
    questions = {q["key"]: q for q in matrix_record(matrix_of("h200", FAKE=ALL))["questions"]}
    assert list(questions) == [question.key for question in QUESTIONS]
    assert questions["softcap"]["asks"] == {"softcap": 30.0}
    assert questions["two_sided_window"]["asks"] == {"window": [1023, 1023], "non_causal": True}
    assert questions["dtype=float16"]["asks"] == {"dtype": "float16"}
    assert questions["dtype=bfloat16"]["asks"] == {}
    assert questions["head_size=80"]["topic"] == "Sizes"


def test_equal_devices_are_one_column_with_every_cell() -> None:
    (backend,) = matrix_record(matrix_of("h200", "mi300x", FAKE=without("lse")))["backends"]
    (column,) = backend["columns"]
    assert column["devices"] == ["h200", "mi300x"]
    assert column["place"] == "NVIDIA h200; AMD mi300x"
    assert (column["answer"], column["preferred"]) == ("yes", "16 NHD")
    assert list(column["cells"]) == [question.key for question in QUESTIONS]
    assert column["cells"]["softcap"] == {"answer": "yes"}
    refused = {"code": "lse", "value": "True", "allowed": "False", "hint": ""}
    assert column["cells"]["lse"] == {"answer": "no", "reasons": [refused]}


def test_a_refused_device_has_its_reason_and_no_cells() -> None:
    nvidia = replace(BARE, devices=(DeviceLimit(vendor=Vendor.NVIDIA),))
    (column,) = matrix_record(matrix_of("mi300x", FAKE=nvidia))["backends"][0]["columns"]
    assert column["answer"] == "no"
    assert column["reasons"][0]["allowed"] == "nvidia"
    assert (column["cells"], column["preferred"]) == ({}, None)


def test_plain_requests_and_rules_are_told() -> None:
    rule = Rule(name="odd", check=lambda _request, _device: None)
    quantised = replace(BARE, kv_cache_dtypes=frozenset({"fp8"}), rules=(rule,))
    (backend,) = matrix_record(matrix_of("h200", FAKE=quantised))["backends"]
    (column,) = backend["columns"]
    assert column["plain_request"] == {"kv_cache_dtype": "fp8"}
    assert column["rules"] == ["odd"]
    assert backend["graph_level"] is None
    assert "NotImplementedError" in backend["problem"]
    assert backend["provided_by"] == "a test"


def test_runs_and_names_that_nothing_provides() -> None:
    record = matrix_record(matrix_of("h200", FAKE=BARE, runs=[run_of("FAKE")]))
    assert record["backends"][0]["columns"][0]["run_on_hardware"] is True
    assert record["hardware_runs"][0]["versions"] == {"torch": "2.11.0"}
    absent = {name["name"]: name for name in record["not_provided"]}
    assert absent["FLASHMLA"] == {
        "name": "FLASHMLA",
        "family": "mla",
        "vendors": ["nvidia"],
        "description": "FlashMLA",
        "is_planned": True,
    }


def test_slow_paths_are_named() -> None:
    slow = without("alibi", Support.SLOW)
    (column,) = matrix_record(matrix_of("h200", FAKE=slow))["backends"][0]["columns"]
    assert column["cells"]["alibi"] == {"answer": "slow", "detail": "slow path for alibi"}
