"""Stubs of vendor libraries, and trees that stand for the kernel's files on Intel GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:  # for what the tests share, whatever the import mode
    sys.path.insert(0, _HERE)

STUBS = Path(__file__).parent / "stubs"

InstallStub = Callable[..., None]

WriteCards = Callable[..., Path]


@pytest.fixture
def install_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallStub]:
    """Return `install(distribution, version, stub)`: `stub` is a folder of `stubs/`, or None.

    Modules may also be written into `tmp_path`. What is really installed is hidden meanwhile.
    """
    before = dict(sys.modules)
    versions: dict[str, str] = {}
    ours = (str(STUBS), str(tmp_path))

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if path is not None:
            return None
        return PathFinder.find_spec(name, [path for path in sys.path if path.startswith(ours)])

    def install(distribution: str, version: str, stub: str | None = None) -> None:
        versions[distribution] = version
        if stub is not None:
            monkeypatch.syspath_prepend(STUBS / stub)
        for name in [name for name in sys.modules if find_spec(name.split(".")[0])]:
            del sys.modules[name]

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    yield install
    for name in set(sys.modules) - set(before):
        module = sys.modules[name]
        places = [str(getattr(module, "__file__", "")), *map(str, getattr(module, "__path__", ()))]
        if any(place.startswith(ours) for place in places):
            del sys.modules[name]
    sys.modules.update({name: before[name] for name in before if name not in sys.modules})


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
