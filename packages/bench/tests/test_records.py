from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from attn_bench.records import from_record
from attn_shared.errors import InvalidInputError


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    share: float
    is_on: bool
    colour: Colour
    inner: Inner
    span: tuple[float, float]
    maybe: int | None
    many: tuple[Inner, ...] = ()
    by_name: Mapping[str, float] | None = None


RECORD: dict[str, Any] = {
    "name": "x",
    "share": 1,
    "is_on": True,
    "colour": "red",
    "inner": {"size": 3},
    "span": [1, 2.5],
    "maybe": None,
    "many": [{"size": 4}],
    "by_name": {"a": 2},
}


def test_a_whole_record() -> None:
    read = from_record(Outer, RECORD | {"a_later_key": 1}, "outer")
    assert read == Outer(
        name="x",
        share=1.0,
        is_on=True,
        colour=Colour.RED,
        inner=Inner(size=3),
        span=(1.0, 2.5),
        maybe=None,
        many=(Inner(size=4),),
        by_name={"a": 2.0},
    )
    assert isinstance(read.share, float)


def test_defaults_fill_what_is_missing() -> None:
    short = {key: value for key, value in RECORD.items() if key not in ("many", "by_name")}
    assert from_record(Outer, short, "outer").many == ()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": 3}, "outer.name is 3; allowed: a string"),
        ({"share": "1"}, "outer.share is '1'; allowed: a finite number"),
        ({"share": float("nan")}, "outer.share is nan"),
        ({"share": True}, "outer.share is True"),
        ({"is_on": 1}, "outer.is_on is 1; allowed: true or false"),
        ({"colour": "blue"}, "outer.colour is 'blue'; allowed: red"),
        ({"inner": []}, r"outer.inner is \[\]; allowed: an object"),
        ({"inner": {}}, "outer.inner.size is missing"),
        ({"inner": {"size": 3.5}}, "outer.inner.size is 3.5; allowed: an integer"),
        ({"span": [1]}, r"outer.span is \[1\]; allowed: a list of 2"),
        ({"span": 1}, "outer.span is 1; allowed: a list"),
        ({"maybe": "x"}, "outer.maybe is 'x'; allowed: an integer"),
        ({"many": [{"size": 4}, {}]}, r"outer.many\[1\].size is missing"),
        ({"by_name": {"a": None}}, "outer.by_name.a is None"),
        ({"by_name": [1]}, r"outer.by_name is \[1\]; allowed: an object"),
    ],
)
def test_each_place_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{complaint}"):
        from_record(Outer, RECORD | change, "outer")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"outer\.name is missing; allowed: a value"):
        from_record(Outer, {}, "outer")


def test_long_values_are_cut() -> None:
    with pytest.raises(InvalidInputError) as caught:
        from_record(Inner, {"size": "x" * 1000}, "inner")
    assert len(str(caught.value)) < 150
