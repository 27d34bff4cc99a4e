from __future__ import annotations

import operator
from collections.abc import Callable

import pytest

from attn_shared.errors import CapabilityComparisonError, InvalidInputError
from attn_shared.vendor import DeviceCapability, Fp8Format, Vendor


def nvidia(major: int, minor: int = 0) -> DeviceCapability:
    return DeviceCapability(vendor=Vendor.NVIDIA, major=major, minor=minor)


def amd(major: int, minor: int = 0) -> DeviceCapability:
    return DeviceCapability(vendor=Vendor.AMD, major=major, minor=minor)


def test_enums_are_their_names() -> None:
    assert [str(vendor) for vendor in Vendor] == ["nvidia", "amd", "intel", "cpu"]
    assert [str(flavour) for flavour in Fp8Format] == ["none", "e4m3fn", "e4m3fnuz"]


def test_capability_prints_as_a_number() -> None:
    assert str(nvidia(9)) == "9.0"
    assert str(nvidia(12, 1)) == "12.1"


def test_order_within_a_vendor_is_numeric_and_not_textual() -> None:
    assert sorted([nvidia(10, 3), nvidia(9), nvidia(8, 9), nvidia(12, 1)]) == [
        nvidia(8, 9),
        nvidia(9),
        nvidia(10, 3),
        nvidia(12, 1),
    ]
    assert nvidia(9) <= nvidia(9)
    assert nvidia(9) >= nvidia(9)
    assert nvidia(10) > nvidia(9)
    assert not nvidia(9) < nvidia(9)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize("other", [amd(9), (9, 0), 90, 9.0, "9.0", None])
def test_order_against_anything_else_is_an_error(
    compare: Callable[[object, object], bool], other: object
) -> None:
    for left, right in ((nvidia(9), other), (other, nvidia(9))):
        with pytest.raises(CapabilityComparisonError, match=r"9\.0") as caught:
            compare(left, right)
        assert isinstance(caught.value, TypeError)


def test_equality_never_raises() -> None:
    assert nvidia(9) == nvidia(9)
    assert nvidia(9) != amd(9)
    assert nvidia(9) != (9, 0)  # type: ignore[comparison-overlap]
    assert hash(nvidia(9)) == hash(nvidia(9))


@pytest.mark.parametrize(
    ("capability", "passes"),
    [(nvidia(9), False), (nvidia(10), True), (nvidia(10, 3), True), (nvidia(12, 1), True)],
)
def test_at_least_is_an_order(capability: DeviceCapability, passes: bool) -> None:
    assert capability.at_least(10) is passes


def test_at_least_looks_at_the_minor_number() -> None:
    assert nvidia(8, 9).at_least(8, 9)
    assert not nvidia(8, 6).at_least(8, 9)
    assert nvidia(9).at_least(8, 9)


def test_is_exactly_is_one_number() -> None:
    assert nvidia(10).is_exactly(10, 0)
    assert not nvidia(10, 3).is_exactly(10, 0)


@pytest.mark.parametrize(
    ("capability", "family"),
    [
        (nvidia(9), 9),
        (nvidia(10), 10),
        (nvidia(10, 3), 10),
        (nvidia(11), 11),
        (nvidia(12), 12),
        (nvidia(12, 1), 12),
    ],
)
def test_is_family_is_kinship_and_no_order(capability: DeviceCapability, family: int) -> None:
    assert [major for major in range(1, 20) if capability.is_family(major)] == [family]


def test_predicates_refuse_numbers_written_like_90() -> None:
    with pytest.raises(InvalidInputError, match="major is 80"):
        nvidia(9).at_least(80)
    with pytest.raises(InvalidInputError, match="major is 90"):
        nvidia(9).is_exactly(90, 0)
    with pytest.raises(InvalidInputError, match="major is 100"):
        nvidia(10).is_family(100)


def test_numbers_are_not_negative() -> None:
    with pytest.raises(InvalidInputError, match="minor is -1"):
        nvidia(9, -1)
