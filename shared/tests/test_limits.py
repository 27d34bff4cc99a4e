from __future__ import annotations

import pytest

from attn_shared.device import Vendor, preset
from attn_shared.errors import InvalidRequestError
from attn_shared.limits import (
    DeviceLimit,
    Exactly,
    MultipleOf,
    SizeSet,
    describe_blocks,
    describe_multiples,
)


def test_multiples_are_values() -> None:
    assert MultipleOf(16) == MultipleOf(16)
    assert len({MultipleOf(16), MultipleOf(16), MultipleOf(32)}) == 2
    assert str(MultipleOf(16)) == "multiple of 16"


def test_a_base_has_multiples() -> None:
    with pytest.raises(InvalidRequestError, match=r"MultipleOf\.base=0 .*int >= 1"):
        MultipleOf(0)


@pytest.mark.parametrize(
    ("bases", "text"),
    [
        ([16], "a multiple of 16"),
        ([64, 32, 16], "a multiple of 16"),
        ([24, 16], "a multiple of 16 or 24"),
        ([1], "any"),
        ([1, 16], "any"),
    ],
)
def test_lists_of_bases_read_without_repetition(bases: list[int], text: str) -> None:
    assert describe_multiples(bases) == text


def test_lists_of_blocks_say_which_have_multiples() -> None:
    assert describe_blocks([Exactly(64), Exactly(16)]) == "16, 64"
    assert describe_blocks([64, MultipleOf(16), Exactly(8)]) == "8, a multiple of 16"
    with pytest.raises(InvalidRequestError, match=r"Exactly\.size=0 .*int >= 1"):
        Exactly(0)


@pytest.mark.parametrize(
    ("sizes", "inside", "outside", "text"),
    [
        (SizeSet.of(128, 64), [64, 128], [0, 96, 256], "64, 128"),
        (SizeSet.of(), [], [0, 1, 64], "none"),
        (SizeSet(), [1, 7, 10**6], [0, -1], "1 or more"),
        (SizeSet(maximum=256), [1, 255, 256], [0, 257], "1 to 256"),
        (
            SizeSet(minimum=8, maximum=256, multiple_of=8),
            [8, 88, 256],
            [0, 4, 9, 264],
            "8 to 256, a multiple of 8",
        ),
    ],
)
def test_sets_of_sizes_hold_and_print(
    sizes: SizeSet, inside: list[int], outside: list[int], text: str
) -> None:
    assert [size in sizes for size in inside] == [True] * len(inside)
    assert [size in sizes for size in outside] == [False] * len(outside)
    assert str(sizes) == text


ALL = ["a100", "rtx4090", "h200", "b200", "b300", "gb10", "mi300x", "rx9070xt", "b60", "spr"]


@pytest.mark.parametrize(
    ("limit", "admitted", "text"),
    [
        (
            DeviceLimit(vendor=Vendor.NVIDIA),
            ["a100", "rtx4090", "h200", "b200", "b300", "gb10"],
            "nvidia",
        ),
        (
            DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 9)),
            ["rtx4090", "h200", "b200", "b300", "gb10"],
            "nvidia >= 8.9",
        ),
        (
            DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0), below=(9, 0)),
            ["a100", "rtx4090"],
            "nvidia >= 8.0 < 9.0",
        ),
        # sm_120 and sm_121 are Blackwell too, and of another family than sm_100 and sm_103.
        (DeviceLimit(vendor=Vendor.NVIDIA, families=(10,)), ["b200", "b300"], "nvidia family 10.x"),
        (
            DeviceLimit(vendor=Vendor.NVIDIA, families=(9, 12)),
            ["h200", "gb10"],
            "nvidia family 9.x/12.x",
        ),
        (
            DeviceLimit(vendor=Vendor.NVIDIA, exact=((10, 0), (9, 0))),
            ["h200", "b200"],
            "nvidia exactly 10.0/9.0",
        ),
        # gfx942 is (9, 4): a limit that counts numbers alone would take it for a Hopper.
        (DeviceLimit(vendor=Vendor.AMD, archs=("gfx942",)), ["mi300x"], "amd gfx942"),
        (DeviceLimit(vendor=Vendor.INTEL), ["b60"], "intel"),
        (DeviceLimit(vendor=Vendor.INTEL, at_least=(1, 0)), [], "intel >= 1.0"),
        (DeviceLimit(vendor=Vendor.CPU, isa=("amx_tile",)), ["spr"], "cpu with amx_tile"),
        (DeviceLimit(vendor=Vendor.CPU, isa=("amx_tile", "neon")), [], "cpu with amx_tile+neon"),
    ],
)
def test_limits_admit_devices_of_their_own_kind(
    limit: DeviceLimit, admitted: list[str], text: str
) -> None:
    assert [name for name in ALL if limit.admits(preset(name))] == admitted
    assert str(limit) == text
