"""Stubs of vendor libraries, and trees that stand for the kernel's files on Intel GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

STUBS = Path(__file__).parent / "stubs"

InstallStub = Callable[..., None]

WriteCards = Callable[..., Path]


@pytest.fixture
def install_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallStub]:
    """Return `install(distribution, version, stub)`: `stub` is a folder of `stubs/`, or None."""
    before = set(sys.modules)

    def install(distribution: str, version: str, stub: str | None = None) -> None:
        folder = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        if stub is not None:
            monkeypatch.syspath_prepend(STUBS / stub)

    yield install
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        places = [str(getattr(module, "__file__", "")), *map(str, getattr(module, "__path__", ()))]
        if any(place.startswith((str(STUBS), str(tmp_path))) for place in places):
            del sys.modules[name]


@pytest.fixture
def write_cards(tmp_path: Path) -> WriteCards:
    """Return `write((device_id, driver, tiles), ...)`: folders that stand for /sys and /dev."""

    def write(*cards: tuple[int, str, int]) -> Path:
        for index, (device_id, driver, tiles) in enumerate(cards):
            node = f"renderD{128 + index}"
            device = tmp_path / "sys/class/drm" / node / "device"
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x8086\n")
            (device / "device").write_text(f"{device_id:#06x}\n")
            slot = f"PCI_SLOT_NAME=0000:{index + 3:02x}:00.0"
            (device / "uevent").write_text(f"DRIVER={driver}\nPCI_CLASS=30000\n{slot}\n")
            for tile in range(tiles):
                folder = f"tile{tile}" if driver == "xe" else f"drm/card{index}/gt/gt{tile}"
                (device / folder).mkdir(parents=True)
            (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
            (tmp_path / "dev/dri" / node).touch()
        return tmp_path

    return write
