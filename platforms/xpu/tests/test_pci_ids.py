"""The table of PCI numbers."""

from __future__ import annotations

import pytest

from attn_shared.arch import parse_arch
from attn_shared.device import Vendor
from attn_xpu.pci_ids import ARCHS, DISCRETE_ARCHS, NAMES


def test_every_architecture_is_one_that_the_shared_tables_know() -> None:
    for name in {*ARCHS.values(), *DISCRETE_ARCHS}:
        arch = parse_arch(name)
        assert (arch.vendor, arch.is_known) == (Vendor.INTEL, True), name


@pytest.mark.parametrize(
    ("number", "arch"),
    [
        (0x56A0, "dg2"),
        (0x56C1, "dg2"),
        (0x0BD5, "pvc"),
        (0x7D55, "mtl"),
        (0x64A0, "lnl"),
        (0xE211, "bmg"),
        (0xE223, "bmg"),
        (0xB0B0, "ptl"),
        (0xD75F, "nvl-p"),
    ],
)
def test_numbers_of_known_parts(number: int, arch: str) -> None:
    assert ARCHS[number] == arch


@pytest.mark.parametrize("number", [0x3E92, 0xE20A, 0x5698, 0x0BD3, 0xB088])
def test_neighbours_of_known_numbers_are_not_guessed(number: int) -> None:
    assert number not in ARCHS


def test_every_named_board_has_an_architecture() -> None:
    assert set(NAMES) <= set(ARCHS)
