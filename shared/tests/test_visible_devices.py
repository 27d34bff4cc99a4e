from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attn_shared.visible_devices import VisibleDeviceKind, VisibleDevices, parse_visible_devices

UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"


def parse(value: str) -> VisibleDevices:
    devices = parse_visible_devices(value)
    assert devices is not None
    return devices


def values(value: str) -> list[str]:
    return [device.value for device in parse(value)]


def test_unset_means_all() -> None:
    assert parse_visible_devices(None) is None


@pytest.mark.parametrize("value", ["", " ", "-1", "NoDevFiles"])
def test_none_is_no_problem(value: str) -> None:
    assert parse(value) == ()
    assert parse(value).problem == ""


@pytest.mark.parametrize(
    ("value", "ordinals"),
    [("0", [0]), ("0,2", [0, 2]), ("2, 1", [2, 1]), (" 7 ", [7]), ("2,+3,-0", [2, 3, 0])],
)
def test_ordinals_keep_their_order(value: str, ordinals: list[int]) -> None:
    devices = parse(value)
    assert [device.ordinal for device in devices] == ordinals
    assert {device.kind for device in devices} == {VisibleDeviceKind.ORDINAL}
    assert devices.problem == ""


@pytest.mark.parametrize(
    ("value", "kept", "culprit"),
    [
        ("0,-1,1", ["0"], "'-1'"),
        ("0,1,2,-1,3", ["0", "1", "2"], "'-1'"),
        ("4,3,two,one", ["4", "3"], "'two'"),
        ("one,two,3,4", [], "'one'"),
        ("0,", ["0"], "''"),
        (",0", [], "''"),
        ("none", [], "'none'"),
        ("GPU-", [], "'GPU-'"),
        ("GPU-xyz", [], "'GPU-xyz'"),
        ("MIG-", [], "'MIG-'"),
        ("MIG-GPU-89/1", [], "'MIG-GPU-89/1'"),
        ("0,-1,0", ["0"], "'-1'"),  # what follows the invalid entry repeats nothing
        ("0,12345678901", ["0"], "'12345678901'"),
    ],
)
def test_list_ends_before_its_first_invalid_entry(
    value: str, kept: list[str], culprit: str
) -> None:
    assert values(value) == kept
    assert culprit in parse(value).problem
    assert "ends the list" in parse(value).problem


def test_a_number_ends_at_its_first_other_character() -> None:
    assert values("1gpu2,2ampere") == ["1", "2"]
    assert "'2ampere' is read as 2" in parse("1gpu2,2ampere").problem


@pytest.mark.parametrize("value", ["0,0", "0,1,2,1", "0,1,+0", f"GPU-{UUID},GPU-{UUID}", "0.1,0.1"])
def test_a_repeated_entry_hides_every_device(value: str) -> None:
    assert parse(value) == ()
    assert "repeated" in parse(value).problem


def test_level_zero_counts_a_repeated_entry_once() -> None:
    devices = parse_visible_devices("0.1,1,0.1", repeats_allowed=True)
    assert devices is not None
    assert [device.value for device in devices] == ["0.1", "1"]
    assert devices.problem == ""


@pytest.mark.parametrize("entry", [f"GPU-{UUID}", "GPU-8932f937", "GPU-DEADBEEFDEADBEEF", "GPU-XX"])
def test_uuid_whole_or_abbreviated(entry: str) -> None:
    (device,) = parse(entry)
    assert (device.kind, device.value, device.ordinal) == (VisibleDeviceKind.UUID, entry, None)


def test_ordinals_and_uuids_may_mix() -> None:
    assert values("0,GPU-DEADBEEF") == ["0", "GPU-DEADBEEF"]


def test_mig_by_its_own_uuid() -> None:
    (device,) = parse(f"MIG-{UUID}")
    assert (device.kind, device.value) == (VisibleDeviceKind.MIG, f"MIG-{UUID}")
    assert (device.parent_uuid, device.gpu_instance, device.compute_instance) == (None,) * 3


def test_mig_by_its_place_on_a_gpu() -> None:
    (device,) = parse(f"MIG-GPU-{UUID}/9/0")
    assert device.kind is VisibleDeviceKind.MIG
    assert device.parent_uuid == f"GPU-{UUID}"
    assert (device.gpu_instance, device.compute_instance) == (9, 0)


def test_sub_devices_of_level_zero() -> None:
    devices = parse("0.1,2,1.0.3")
    assert [device.ordinal for device in devices] == [0, 2, 1]
    assert [device.sub_devices for device in devices] == [(1,), (), (0, 3)]
    assert [device.value for device in devices] == ["0.1", "2", "1.0.3"]


@pytest.mark.parametrize(
    ("entry", "uuid", "matches"),
    [
        ("GPU-8932f937", f"GPU-{UUID}", True),
        ("GPU-8932F937", UUID, True),
        (f"GPU-{UUID}", UUID, True),
        ("GPU-8932f938", UUID, False),
        (f"MIG-{UUID}", f"MIG-{UUID}", True),
        ("0", "0", False),
    ],
)
def test_matches_uuid(entry: str, uuid: str, matches: bool) -> None:
    (device,) = parse(entry)
    assert device.matches_uuid(uuid) is matches


def test_a_problem_survives_copies() -> None:
    devices = parse("0,-1")
    for twin in (copy.copy(devices), copy.deepcopy(devices), pickle.loads(pickle.dumps(devices))):
        assert twin == devices
        assert twin.problem == devices.problem


ENTRIES = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.from_regex(r"(GPU-|MIG-|MIG-GPU-)?[0-9a-fx./+-]{0,10}"),
)


@given(st.one_of(st.text(), st.lists(ENTRIES, max_size=6).map(",".join)))
@example("9" * 5000)
@example("0." + "9" * 5000)
@example("\u0669")  # a digit, though not ASCII
@settings(derandomize=True, max_examples=400)
def test_no_text_raises(value: str) -> None:
    devices = parse(value)
    assert len(set(devices)) == len(devices)
    assert len(devices) <= value.count(",") + 1
    if not devices and value.strip() not in ("", "-1", "NoDevFiles"):
        assert devices.problem
