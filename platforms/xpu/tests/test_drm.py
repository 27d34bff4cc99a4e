"""The kernel's files on Intel GPUs, from trees written for the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attn_xpu.drm import read_cards

WriteCards = Callable[..., Path]


def test_a_card_is_read(write_cards: WriteCards) -> None:
    (card,) = read_cards(write_cards((0xE211, "xe", 1)) / "sys")
    assert (card.pci_address, card.device_id, card.driver) == ("0000:03:00.0", 0xE211, "xe")
    assert (card.arch, card.name, card.is_discrete) == ("bmg", "Intel Arc Pro B60", True)
    assert (card.render_node, card.num_tiles) == ("renderD128", 1)


def test_an_integrated_gpu_without_a_name(write_cards: WriteCards) -> None:
    (card,) = read_cards(write_cards((0x64A0, "xe", 2)) / "sys")
    assert (card.arch, card.name, card.is_discrete) == ("lnl", "Intel GPU 8086:64a0", False)
    assert card.num_tiles == 1  # its second "tile" is the media engine's


@pytest.mark.parametrize("driver", ["xe", "i915"])
def test_tiles_of_a_data_center_gpu(write_cards: WriteCards, driver: str) -> None:
    (card,) = read_cards(write_cards((0x0BD5, driver, 2)) / "sys")
    assert (card.arch, card.num_tiles, card.driver) == ("pvc", 2, driver)


def test_an_unknown_number_has_no_architecture(write_cards: WriteCards) -> None:
    (card,) = read_cards(write_cards((0xFFFE, "xe", 1)) / "sys")
    assert (card.arch, card.name, card.is_discrete) == (None, "Intel GPU 8086:fffe", False)


def test_cards_of_other_vendors_are_passed_over(write_cards: WriteCards) -> None:
    root = write_cards((0xE211, "xe", 1), (0xE20B, "xe", 1))
    (root / "sys/class/drm/renderD128/device/vendor").write_text("0x10de\n")
    assert [card.device_id for card in read_cards(root / "sys")] == [0xE20B]


def test_cards_come_in_the_order_of_their_addresses(write_cards: WriteCards) -> None:
    root = write_cards((0xE211, "xe", 1), (0xE20B, "xe", 1))
    (root / "sys/class/drm/renderD128/device/uevent").write_text("PCI_SLOT_NAME=0000:9a:00.0\n")
    assert [card.device_id for card in read_cards(root / "sys")] == [0xE20B, 0xE211]


def test_files_that_are_missing_are_no_crash(tmp_path: Path) -> None:
    (tmp_path / "class/drm/renderD128/device").mkdir(parents=True)
    assert read_cards(tmp_path) == ()
    assert read_cards(tmp_path / "absent") == ()
