from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from matrix_testing import BARE, devices, matrix_of, run_of

from attn_cli.matrix.merging import columns, columns_of_all, grouped, place
from attn_cli.matrix.survey import AskedDevice
from attn_shared.capability import Capability, Support
from attn_shared.device import PRESETS, DeviceFacts, Vendor

ALL_PRESETS = AskedDevice.presets()


def presets(*names: str) -> list[AskedDevice]:
    """Presets in their own order."""
    return [device for device in ALL_PRESETS if device.name in names]


def all_but(*names: str) -> list[AskedDevice]:
    return [device for device in ALL_PRESETS if device.name not in names]


def sinks_on_hopper(device: DeviceFacts) -> Capability:
    sinks = Support.YES if device.arch_family == "hopper" else Support.NO
    return replace(BARE, sinks=sinks)


def head_size_on_amd(device: DeviceFacts) -> Capability:
    return replace(BARE, lse=Support.SLOW if device.vendor is Vendor.AMD else Support.YES)


def test_merged_devices_are_equal_and_others_are_not() -> None:
    found = matrix_of(FAKE=sinks_on_hopper, OTHER=head_size_on_amd, runs=[run_of("OTHER")])
    for sheets in found.sheets.values():
        merged = columns(sheets)
        for column in merged:
            assert len({sheet.essence for sheet in column.sheets}) == 1
            for one, other in combinations(column.sheets, 2):
                assert {k: c.essence for k, c in one.cells.items()} == {
                    k: c.essence for k, c in other.cells.items()
                }
        assert len({column.sheet.essence for column in merged}) == len(merged)
        assert sorted(d.name for c in merged for d in c.devices) == sorted(PRESETS)


def test_columns_of_one_backend() -> None:
    found = matrix_of(FAKE=sinks_on_hopper)
    names = [[device.name for device in column.devices] for column in columns(found.sheets["FAKE"])]
    assert sorted(names[1]) == ["h100", "h200"]
    assert len(names) == 2


def test_a_run_sets_a_column_apart() -> None:
    found = matrix_of("a100", "h200", "b200", FAKE=BARE, runs=[run_of("FAKE")])
    names = [[device.name for device in column.devices] for column in columns(found.sheets["FAKE"])]
    assert names == [["a100", "b200"], ["h200"]]


def test_columns_of_all_backends_keep_vendors_apart() -> None:
    found = matrix_of("a100", "h200", "mi300x", "b60", FAKE=sinks_on_hopper, OTHER=BARE)
    answers = columns_of_all(found, base_only=False)
    assert [[d.name for d in group] for group in answers] == [
        ["a100"],
        ["h200"],
        ["mi300x"],
        ["b60"],
    ]
    base = columns_of_all(found)
    assert [[d.name for d in group] for group in base] == [["a100", "h200"], ["mi300x"], ["b60"]]


def test_grouped_keeps_the_order_of_the_first_of_each() -> None:
    sheets = matrix_of("a100", "mi300x", "h100", FAKE=BARE).sheets["FAKE"]
    found = grouped(sheets, lambda sheet: sheet.device.facts.vendor)
    assert [[d.name for d in column.devices] for column in found] == [["a100", "h100"], ["mi300x"]]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (list(ALL_PRESETS), "every device"),
        (presets("max1550", "b60"), "Intel"),
        (presets("h100", "h200"), "NVIDIA hopper"),
        (presets("h100"), "NVIDIA h100"),
        (presets("b300"), "NVIDIA sm_103"),
        (presets("t4", "mi355x"), "NVIDIA turing; AMD cdna4"),
        (all_but("t4"), "NVIDIA except turing; AMD; Intel; CPU"),
        (all_but("spr", "h100", "h200"), "NVIDIA except hopper; AMD; Intel; CPU except spr"),
    ],
)
def test_places_are_named_as_shortly_as_is_true(group: list[AskedDevice], expected: str) -> None:
    assert place(group, ALL_PRESETS) == expected


def test_a_vendors_name_needs_all_of_its_presets() -> None:
    asked = devices("h200", "mi300x")
    assert place(asked, asked) == "NVIDIA h200; AMD mi300x"
    assert place(asked[:1], asked) == "NVIDIA h200"


def test_a_device_that_is_no_preset_goes_by_its_own_name() -> None:
    asked = devices("sm_90a")
    assert place(asked, asked) == "sm_90a"
    more = (*ALL_PRESETS, *asked)
    assert place(more, more) == "every device"
    assert place(asked, more) == "sm_90a"
