from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from matrix_testing import ALL, BARE, backend_of, devices, matrix_of, run_of, selector_of, without

from attn_cli.matrix.html_page import html_page
from attn_cli.matrix.survey import survey
from attn_shared.capability import DeviceLimit, Reason, Rule, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.request import AttentionRequest

VOID = {"meta", "input", "link", "br"}


class Page(HTMLParser):
    """The rows of the page's first table, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [str(values[key]) for key in ("src", "href") if values.get(key)]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append({"axis": values.get("data-axis"), "cells": []})
        if tag == "td":
            self.rows[-1]["cells"].append({**values, "text": ""})

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.rows[-1]["cells"][-1]["text"] += data

    def cells(self, axis: str) -> list[dict[str, Any]]:
        return next(row["cells"] for row in self.rows if row["axis"] == axis)


def whys(text: str) -> list[str]:
    found = re.search(r'id="whys">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    listed: list[str] = json.loads(found[1])
    return listed


def test_the_page_is_whole_and_needs_nothing_beside_itself() -> None:
    text = html_page(matrix_of(FAKE=ALL, OTHER=BARE))
    page = Page(text)
    assert page.open == []
    assert page.addresses == []
    assert "<!--" not in text
    assert "url(" not in text
    assert "http" not in text
    assert "prefers-color-scheme: dark" in text


def test_cells_carry_answer_vendor_and_reason() -> None:
    slow = replace(without("softcap", Support.SLOW), alibi=Support.NO)
    text = html_page(matrix_of("h200", "spr", FAKE=slow, runs=[run_of("FAKE")]))
    page, reasons = Page(text), whys(text)
    h200, spr = page.cells("softcap")
    assert (h200["text"], h200["class"]) == ("slow", "slow v-nvidia")
    assert reasons[int(h200["data-why"])] == (
        "slow; slow path for softcap\nrun on NVIDIA H200, 2026-01-31: everything, 12 passed"
    )
    assert spr["class"] == "slow v-cpu not-run"
    assert reasons[int(spr["data-why"])].endswith(
        "\nnot run on hardware: follows from the capability alone"
    )
    assert [cell["class"] for cell in page.cells("alibi")] == ["no v-nvidia", "no v-cpu"]
    refused = reasons[int(page.cells("alibi")[0]["data-why"])]
    assert refused == "no; allowed alibi: False"


def test_quantities_list_values_and_tell_what_is_refused() -> None:
    text = html_page(matrix_of("h200", FAKE=BARE))
    (cell,) = Page(text).cells("head_size")
    assert cell["text"] == "64, 128"
    first, *rest = whys(text)[int(cell["data-why"])].splitlines()
    assert first == (
        "32, 40, 48, 72, 80, 96, 112, 120, 160, 192, 256, 320, 512, 576: "
        "no; allowed head_size: 64, 128"
    )
    assert rest == ["not run on hardware: follows from the capability alone"]


def test_refused_devices_are_muted() -> None:
    nvidia = replace(BARE, devices=(DeviceLimit(vendor=Vendor.NVIDIA),))
    text = html_page(matrix_of("h200", "b60", FAKE=nvidia))
    assert Page(text).cells("window")[1]["class"] == "no v-intel refused"


def test_devices_of_one_vendor_with_equal_answers_are_one_column() -> None:
    def hopper_sinks(device: DeviceFacts) -> Any:
        return replace(BARE, sinks=Support.YES if device.arch == "sm_90" else Support.NO)

    text = html_page(matrix_of("a100", "b200", "h200", "b60", FAKE=hopper_sinks))
    assert re.findall(r'data-place="([^"]*)"', text) == [
        "NVIDIA a100, b200",
        "NVIDIA h200",
        "Intel b60",
    ]
    assert 'colspan="2" scope="colgroup" class="v-nvidia">NVIDIA<' in text


def test_words_of_others_cannot_break_the_page() -> None:
    evil = "</script><b>&"

    def refuse(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        return Reason(code="odd", value="1", allowed=evil) if request.has_sinks else None

    selector = selector_of()
    ability = replace(ALL, rules=(Rule(name="odd", check=refuse),))
    backend = backend_of("FAKE", ability, description=evil)
    selector.registry.register("FAKE", backend, source="a test")
    text = html_page(
        survey(selector, devices=devices("h200"), backends=["FAKE"]), title=evil, note=evil
    )
    page = Page(text)
    assert page.open == []
    assert evil not in text
    (cell,) = page.cells("sink")
    assert whys(text)[int(cell["data-why"])] == f"no; allowed odd: {evil}"


def test_runs_and_absent_names_have_tables() -> None:
    text = html_page(matrix_of("h200", FAKE=BARE, runs=[run_of("FAKE", record="in <a> drawer")]))
    assert "<td>in &lt;a&gt; drawer</td>" in text
    assert "<td>FLASHMLA</td><td>mla</td><td>NVIDIA</td><td>FlashMLA</td><td>planned</td>" in text
