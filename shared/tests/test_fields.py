from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass

import pytest

from attn_shared._fields import CachedHash, member_of, require_bool, require_positive
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidRequestError, UnknownNameError


class CountedHash:
    """Equal to every other, and counts how often it was hashed."""

    def __init__(self) -> None:
        self.times = 0

    def __hash__(self) -> int:
        self.times += 1
        return 7

    def __eq__(self, other: object) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(CachedHash):
    first: object
    second: object = None

    __hash__ = CachedHash.__hash__


def test_a_record_is_hashed_once() -> None:
    counted = CountedHash()
    pair = Pair(first=counted)
    assert hash(pair) == hash(pair)
    assert counted.times == 1


def test_equal_records_hash_equally_whether_hashed_before_or_not() -> None:
    first, second = Pair(first="a", second=2), Pair(first="a", second=2)
    hash(first)
    assert first == second
    assert hash(first) == hash(second) == hash(("a", 2))


def test_the_hash_is_not_pickled() -> None:
    # A hash of strings is wrong in the next process: it must not travel.
    pair = Pair(first="a")
    assert b"_hash" not in pickle.dumps(pair)
    before = pickle.dumps(pair)
    hash(pair)
    assert pickle.dumps(pair) == before


def test_a_record_stays_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Pair(first=1).first = 2  # type: ignore[misc]


@pytest.mark.parametrize("value", [1, 576])
def test_positive_ints_pass(value: int) -> None:
    require_positive("head_size", value)


@pytest.mark.parametrize("value", [0, -1, -16, True, 1.0, "16", None])
def test_what_is_no_positive_int_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        require_positive("block_size", value)
    assert str(caught.value) == f"block_size={value!r} is not allowed; allowed: an int >= 1."


@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_what_is_no_bool_is_refused(value: object) -> None:
    require_bool("has_sinks", value=True)
    with pytest.raises(InvalidRequestError, match=f"has_sinks={value!r} .* True or False"):
        require_bool("has_sinks", value)


def test_a_member_is_found_by_itself_and_by_its_name() -> None:
    assert member_of(KVCacheLayout, "layout", KVCacheLayout.HND) is KVCacheLayout.HND
    assert member_of(KVCacheLayout, "layout", "HND") is KVCacheLayout.HND


@pytest.mark.parametrize("value", ["hnd", "", 1, None, ["HND"]])
def test_what_names_no_member_is_refused(value: object) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown layout .*; allowed: HND, NHD"):
        member_of(KVCacheLayout, "layout", value)
