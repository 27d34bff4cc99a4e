"""Stubs of vendor libraries: the real signatures, and the metadata of a distribution."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

STUBS = Path(__file__).parent / "stubs"

InstallStub = Callable[..., None]


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
