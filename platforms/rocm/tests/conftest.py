"""Stubs of vendor libraries, and trees that stand for the kernel's topology of GPUs."""

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

# Properties of nodes, cut to what is read, with the values that the kernel gives for these parts.
MI250_DIE = {
    "cpu_cores_count": 0,
    "simd_count": 416,
    "simd_per_cu": 4,
    "gfx_target_version": 90010,
    "vendor_id": 4098,
    "device_id": 29708,
    "unique_id": 0x1234567890ABCDEF,
    "lds_size_in_kb": 64,
    "wave_front_size": 64,
    "drm_render_minor": 128,
}
MI300X = {
    **MI250_DIE,
    "simd_count": 1216,
    "gfx_target_version": 90402,
    "device_id": 29857,
    "unique_id": 0xA0B0C0D0E0F00102,
    "num_xcc": 8,
}
RX7900XTX = {
    **MI250_DIE,
    "simd_count": 192,
    "simd_per_cu": 2,
    "gfx_target_version": 110000,
    "device_id": 29772,
    "unique_id": 0x55AA55AA55AA55AA,
    "wave_front_size": 32,
}
CPU_NODE = {"cpu_cores_count": 96, "simd_count": 0, "gfx_target_version": 0, "vendor_id": 0}
MEMORY_BYTES = {90010: 64 * 2**30, 90402: 192 * 2**30, 110000: 24 * 2**30}

WriteKfd = Callable[..., Path]


@pytest.fixture
def nodes() -> dict[str, dict[str, int]]:
    """Return the properties of nodes by part."""
    return {"cpu": CPU_NODE, "mi250": MI250_DIE, "mi300x": MI300X, "rx7900xtx": RX7900XTX}


@pytest.fixture
def write_kfd(tmp_path: Path) -> WriteKfd:
    """Return `write(*nodes)`: a folder that stands for /sys; a node is a dictionary or None.

    None is a node whose properties may not be read.
    """

    def write(*nodes: dict[str, int] | None) -> Path:
        sysfs = tmp_path / "sys"
        for index, properties in enumerate(nodes):
            node = sysfs / "class/kfd/kfd/topology/nodes" / str(index)
            node.mkdir(parents=True)
            if properties is None:
                (node / "properties").mkdir()  # reading it fails for root as well
                continue
            lines = "".join(f"{name} {value}\n" for name, value in properties.items())
            (node / "properties").write_text(lines)
            memory = MEMORY_BYTES.get(properties["gfx_target_version"], 0)
            for bank, (heap, size) in enumerate([(0, 2**40), (1, memory), (4, 65536)]):
                folder = node / "mem_banks" / str(bank)
                folder.mkdir(parents=True)
                (folder / "properties").write_text(f"heap_type {heap}\nsize_in_bytes {size}\n")
        return sysfs

    return write


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
