"""Facts of the visible Intel GPUs, and what Level Zero's variables hide."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from attn_shared.device import Fp8Format, Vendor
from attn_xpu import devices
from attn_xpu.devices import Visible, find_visible, torch_devices
from attn_xpu.drm import Card


def card(device_id: int, slot: int, tiles: int = 1) -> Card:
    return Card(
        pci_address=f"0000:{slot:02x}:00.0",
        device_id=device_id,
        driver="xe",
        render_node=f"renderD{128 + slot}",
        num_tiles=tiles,
    )


B60, SECOND_B60 = card(0xE211, 3), card(0xE211, 4)
B580 = card(0xE20B, 5)
LUNAR_LAKE = card(0x64A0, 0)
MAX_1550, SECOND_MAX_1550 = card(0x0BD5, 8, 2), card(0x0BD5, 9, 2)


def see(cards: list[Card], **environ: str) -> Visible:
    return find_visible(cards, environ)


def test_facts_of_a_card() -> None:
    (device,) = see([B60]).devices
    assert (device.vendor, device.name, device.arch) == (Vendor.INTEL, "Intel Arc Pro B60", "bmg")
    assert (device.arch_family, device.capability, device.fp8) == ("xe2", None, Fp8Format.NONE)
    assert (device.index, device.memory_bytes, device.compute_units) == (0, None, None)
    assert "known once torch.xpu runs" in device.notes[0]
    json.dumps(device.to_dict())


def test_equal_cards_are_numbered() -> None:
    assert [device.index for device in see([B60, SECOND_B60]).devices] == [0, 1]


def test_unequal_cards_are_flagged_and_have_no_number() -> None:
    seen = see([B60, B580])
    assert [device.index for device in seen.devices] == [None, None]
    assert all("unequal GPUs" in device.notes[1] for device in seen.devices)


def test_cards_hide_integrated_gpus_as_in_torch() -> None:
    (device,) = see([LUNAR_LAKE, B60]).devices
    assert (device.arch, device.index) == ("bmg", 0)
    (device,) = see([LUNAR_LAKE]).devices
    assert device.arch == "lnl"


def test_a_mask_over_unequal_devices_counts_in_an_unknown_order() -> None:
    (device,) = see([LUNAR_LAKE, B60], ZE_AFFINITY_MASK="0").devices
    assert device.index is None


def test_tiles_are_devices_unless_the_hierarchy_is_composite() -> None:
    flat = see([MAX_1550, SECOND_MAX_1550])
    assert [device.index for device in flat.devices] == [0, 1, 2, 3]
    assert "tile 1 of 2 of the card 0000:08:00.0" in flat.devices[1].notes
    composite = see([MAX_1550, SECOND_MAX_1550], ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE")
    assert len(composite.devices) == 2
    assert not any("tile" in note for device in composite.devices for note in device.notes)


@pytest.mark.parametrize(
    ("mask", "slots"),
    [
        ("0", [8]),
        ("3", [9]),
        ("3,0", [8, 9]),  # a mask filters, it does not reorder
        ("0,0,1", [8, 8]),
        ("", [8, 8, 9, 9]),
        ("-1", []),
    ],
)
def test_a_flat_mask_counts_tiles(mask: str, slots: list[int]) -> None:
    seen = see([MAX_1550, SECOND_MAX_1550], ZE_AFFINITY_MASK=mask)
    assert [int(card.pci_address[5:7], 16) for card in seen.cards] == slots
    assert seen.problem == ""


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [("0", [None]), ("0.1", [1]), ("0.0,0.1", [None]), ("1.1,0.0", [0, 1]), ("1,0", [None, None])],
)
def test_a_composite_mask_counts_cards_and_names_tiles(mask: str, tiles: list[int | None]) -> None:
    environ = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": mask}
    seen = find_visible([MAX_1550, SECOND_MAX_1550], environ)
    found = [next((n for n in d.notes if n.startswith("tile")), None) for d in seen.devices]
    assert [None if note is None else int(note.split()[1]) for note in found] == tiles


@pytest.mark.parametrize(
    ("mask", "count", "words"),
    [
        ("0,7", 1, "'7' names no device of this machine"),
        ("0.1", 0, "'0.1' names no device of this machine"),
        ("cat", 0, "'cat' names no device"),
        ("0,cat,1", 1, "'cat' names no device and ends the list"),
    ],
)
def test_bad_entries_are_told(mask: str, count: int, words: str) -> None:
    seen = see([B60, SECOND_B60], ZE_AFFINITY_MASK=mask)
    assert len(seen.devices) == count
    assert words in seen.problem


def test_a_selector_leaves_the_numbers_unknown() -> None:
    (device,) = see([B60], ONEAPI_DEVICE_SELECTOR="level_zero:gpu").devices
    assert device.index is None
    assert any("ONEAPI_DEVICE_SELECTOR='level_zero:gpu'" in note for note in device.notes)


def test_an_unknown_number_is_described_and_not_guessed() -> None:
    (device,) = see([card(0xFFFE, 3)]).devices
    assert (device.arch, device.arch_family) == ("pci-fffe", "unknown")
    assert "PCI number fffe is of no architecture known here" in device.notes


def test_torch_is_not_asked_while_its_runtime_is_down() -> None:
    assert torch_devices() is None
    assert devices.runtime_version() is None


def test_torchs_properties_are_taken_once_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="Intel(R) Arc(TM) Pro B60 Graphics",
        device_id=0xE211,
        total_memory=24 * 2**30,
        gpu_subslice_count=20,
        driver_version="1.14.37020",
        has_fp64=True,
    )
    monkeypatch.setattr(devices, "is_running", lambda runtime: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: properties)
    found = torch_devices()
    assert found is not None
    (device,) = found
    assert (device.arch, device.index) == ("bmg", 0)
    assert (device.memory_bytes, device.compute_units) == (24 * 2**30, 20)
    assert "driver 1.14.37020" in device.notes[0]
    assert device.notes[1:] == ("a client GPU, a card", "fp64: in hardware")
    assert devices.runtime_version() == "1.14.37020"


@pytest.mark.parametrize(
    ("has_fp64", "words"), [(False, "none"), (None, "this torch does not say")]
)
def test_missing_fp64_is_told(has_fp64: bool | None, words: str) -> None:
    properties = SimpleNamespace(
        name="x", total_memory=1, gpu_subslice_count=0, driver_version="1", has_fp64=has_fp64
    )
    device = devices._torch_device(properties, 0)
    assert device.notes[1:] == ("a GPU of unknown kind", f"fp64: {words}")
    assert device.compute_units is None


@pytest.mark.parametrize(
    ("device_id", "kind"),
    [
        (0x0BD5, "a data-center GPU"),
        (0x56C0, "a data-center GPU"),  # Flex: the architecture of the Arc A cards
        (0x56A0, "a client GPU, a card"),
        (0xE211, "a client GPU, a card"),
        (0x64A0, "a client GPU, integrated"),
        (0xFFFE, "a GPU of unknown kind"),
    ],
)
def test_parts_of_clients_and_of_data_centers_are_told_apart(device_id: int, kind: str) -> None:
    (device,) = see([card(device_id, 3)]).devices
    assert kind in device.notes
