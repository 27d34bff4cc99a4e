from __future__ import annotations

from dataclasses import replace

import pytest
from matrix_testing import ALL, BARE, matrix_of, run_of, without

from attn_cli.matrix.markdown import escaped, markdown_page, table
from attn_shared.capability import DeviceLimit, Reason, Rule, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.request import AttentionRequest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a | b", r"a \| b"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("_odd_", r"\_odd\_"),
        ("*[x]<b>`c`\\", r"\*\[x\]\<b>\`c\`\\"),
        ("two\nlines", "two lines"),
    ],
)
def test_words_of_others_are_shown_literally(text: str, expected: str) -> None:
    assert escaped(text) == expected


def test_a_table() -> None:
    assert table(("A", "B"), [("1", "2")]) == "| A | B |\n| --- | --- |\n| 1 | 2 |"


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    below = page.split(f"\n{heading}\n", 1)[1].lstrip().splitlines()
    first = next(i for i, line in enumerate(below) if line.startswith("|"))
    found = []
    for line in below[first:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return [found[0], *found[2:]]


def test_where_backends_run_is_a_grid_with_reasons_below() -> None:
    nvidia = replace(BARE, devices=(DeviceLimit(vendor=Vendor.NVIDIA),))
    page = markdown_page(matrix_of("h200", "b60", FAKE=nvidia, ANY=ALL, runs=[run_of("FAKE")]))
    assert rows(page, "## Where each backend runs") == [
        ["Backend", "NVIDIA h200", "Intel b60"],
        ["FAKE", "yes", "**no**"],
        ["ANY", "yes °", "yes °"],
    ]
    assert "| FAKE | Intel b60 | allowed device: nvidia |" in page


def test_answers_are_told_apart() -> None:
    slow = replace(without("softcap", Support.SLOW), alibi=Support.NO)
    page = markdown_page(matrix_of("h200", FAKE=slow))
    assert rows(page, "## Logits and LSE") == [
        ["Backend", "Where", "sinks", "softcap", "ALiBi", "LSE"],
        ["FAKE", "NVIDIA h200", "yes °", "slow °", "**no**", "yes °"],
    ]
    run = markdown_page(matrix_of("h200", FAKE=slow, runs=[run_of("FAKE")]))
    assert rows(run, "## Logits and LSE")[1][2:] == ["yes", "slow", "**no**", "yes"]


def test_limits_runs_and_combinations() -> None:
    rule = Rule(name="odd_rule", check=lambda _request, _device: None)
    page = markdown_page(
        matrix_of("h200", FAKE=replace(without("dcp"), rules=(rule,)), runs=[run_of("FAKE")])
    )
    assert ["DCP", "NVIDIA h200", "dcp: 1"] in rows(page, "### FAKE")
    assert "Combinations are also refused by: `odd_rule`." in page
    assert rows(page, "## Runs")[1] == [
        "FAKE",
        "NVIDIA H200 (sm_90)",
        "2026-01-31",
        "torch 2.11.0",
        "everything: 12 passed",
        "in a drawer",
    ]


def test_no_run_is_said() -> None:
    assert "## Runs\n\nNone is on record." in markdown_page(matrix_of("h200", FAKE=BARE))


def test_words_of_a_backend_cannot_break_the_page() -> None:
    def refuse(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        if not request.has_sinks:
            return None
        return Reason(code="odd", value="1", allowed="a | b <i>", hint="see [x](y)")

    page = markdown_page(
        matrix_of("h200", FAKE=replace(ALL, rules=(Rule(name="odd", check=refuse),)))
    )
    assert r"| sinks | NVIDIA h200 | odd: a \| b \<i> (see \[x\](y)) |" in page


def test_a_capability_that_raises_is_shown() -> None:
    def broken(_device: DeviceFacts) -> None:
        raise RuntimeError("out | of luck")

    page = markdown_page(matrix_of("h200", BROKEN=broken))  # type: ignore[arg-type]
    assert rows(page, "## Where each backend runs")[1] == ["BROKEN", "unavailable"]
    assert r"out \| of luck" in page


def test_names_that_nothing_provides_stand_apart_with_what_they_are() -> None:
    page = markdown_page(matrix_of("h200", FAKE=BARE))
    absent = {row[0]: row[1:] for row in rows(page, "## Known and not provided")[1:]}
    assert absent["FLASHMLA"] == ["mla", "nvidia", "FlashMLA", "planned"]
    assert absent["MAMBA2"][3] == "not planned"
    assert "FAKE" not in absent


def test_title_and_preface() -> None:
    page = markdown_page(matrix_of("h200", FAKE=BARE), title="T", preface="P *p*")
    assert page.startswith("# T\n\nP *p*\n\n")
    assert page.endswith(" |\n")
