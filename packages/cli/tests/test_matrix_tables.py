from __future__ import annotations

from dataclasses import replace

import pytest
from matrix_testing import ALL, BARE, matrix_of, question, run_of, without

from attn_cli.matrix.answers import Answer, Cell
from attn_cli.matrix.questions import QUESTIONS, Topic
from attn_cli.matrix.tables import allowed, limits, summary, topic_table
from attn_shared.capability import Capability, DeviceLimit, MultipleOf, Reason, Support
from attn_shared.device import DeviceFacts, Vendor

SIZES = [q for q in QUESTIONS if q.axis == "head_size"]
LAYOUTS = [q for q in QUESTIONS if q.axis == "kv_layout"]


def cells(answers: dict[str, Answer], default: Answer = Answer.NO) -> list[Cell]:
    return [Cell(answer=answers.get(asked.value, default)) for asked in SIZES]


@pytest.mark.parametrize("answer", [Answer.YES, Answer.SLOW, Answer.NO, Answer.UNAVAILABLE])
def test_a_feature_is_its_answer(answer: Answer) -> None:
    assert summary([question("sink")], [Cell(answer=answer)]) == str(answer)


def test_what_is_no_question_is_not_applicable() -> None:
    nothing = Cell(answer=Answer.NO_QUESTION)
    assert summary([question("per_head_quant_scales")], [nothing]) == "n/a"
    assert summary(SIZES, cells({}, Answer.NO_QUESTION)) == "n/a"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"64": Answer.YES, "128": Answer.YES}, "64, 128"),
        ({"32": Answer.YES, "40": Answer.YES, "48": Answer.YES}, "32-48"),
        ({"32": Answer.YES, "40": Answer.YES, "64": Answer.YES}, "32, 40, 64"),
        ({"64": Answer.YES, "576": Answer.SLOW}, "64; slow: 576"),
        ({"64": Answer.UNKNOWN}, "unknown: 64"),
        ({}, "none"),
    ],
)
def test_values_that_are_served_are_listed(answers: dict[str, Answer], expected: str) -> None:
    assert summary(SIZES, cells(answers)) == expected


def test_names_are_never_a_span() -> None:
    every = [Cell(answer=Answer.YES)] * 2
    assert summary(LAYOUTS, every) == "NHD, HND"


def test_a_topic_has_a_column_per_axis_and_a_row_per_kind_of_device() -> None:
    def sinks(device: DeviceFacts) -> Capability:
        is_slow = device.vendor is Vendor.CPU
        return replace(BARE, sinks=Support.SLOW if is_slow else Support.YES)

    found = topic_table(matrix_of(FAKE=sinks, OTHER=without("lse")), Topic.LOGITS)
    assert found.headings == ("sinks", "softcap", "ALiBi", "LSE")
    shown = [(row.backend, row.place, [entry.text for entry in row.entries]) for row in found.rows]
    assert shown == [
        ("FAKE", "NVIDIA; AMD; Intel", ["yes", "no", "no", "no"]),
        ("FAKE", "CPU", ["slow", "no", "no", "no"]),
        ("OTHER", "every device", ["yes", "yes", "yes", "no"]),
    ]


def test_rows_tell_where_the_backend_was_run() -> None:
    found = topic_table(matrix_of("a100", "h200", FAKE=ALL, runs=[run_of("FAKE")]), Topic.MASK)
    assert [(row.place, row.entries[0].is_run) for row in found.rows] == [
        ("NVIDIA a100", False),
        ("NVIDIA h200", True),
    ]


def test_devices_that_are_refused_have_no_row() -> None:
    nvidia = replace(ALL, devices=(DeviceLimit(vendor=Vendor.NVIDIA),))
    found = topic_table(matrix_of("mi300x", FAKE=nvidia), Topic.MASK)
    assert found.rows == ()


def test_limits_are_given_with_where_and_what_is_allowed() -> None:
    def some(device: DeviceFacts) -> Capability:
        base = 32 if device.vendor is Vendor.AMD else 16
        return replace(ALL, dcp=Support.NO, block_sizes=(MultipleOf(base),))

    questions = [q for q in QUESTIONS if q.axis in ("dcp", "block_size")]
    found = limits(matrix_of("h200", "mi300x", FAKE=some, questions=questions), "FAKE")
    hint = "(leave it open to get 16)"
    assert [(limit.place, limit.asked, limit.allowed) for limit in found] == [
        ("NVIDIA h200; AMD mi300x", "DCP", "dcp: 1"),
        ("NVIDIA h200", "block sizes: 1, 8, 24", f"block_size: a multiple of 16 {hint}"),
        (
            "AMD mi300x",
            "block sizes: 1, 8, 16, 24, 48, 528",
            f"block_size: a multiple of 32 {hint}",
        ),
    ]


def test_where_a_backend_does_not_run_it_has_no_limits() -> None:
    amd = replace(BARE, devices=(DeviceLimit(vendor=Vendor.AMD),))
    assert limits(matrix_of("h200", FAKE=amd), "FAKE") == []


def test_all_reasons_are_limits() -> None:
    reasons = (
        Reason(code="mla", value="True", allowed="False"),
        Reason(code="head_size", value="576", allowed="64", hint="ask for less"),
    )
    cell = Cell(answer=Answer.NO, reasons=reasons)
    assert allowed(cell) == "mla: False; head_size: 64 (ask for less)"
