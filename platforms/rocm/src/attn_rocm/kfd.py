"""AMD GPUs as the kernel lists them: the topology files of KFD, amdgpu's compute driver.

They are plain files, so that reading them starts no runtime. Source of their names and units: the
kernel's drivers/gpu/drm/amd/amdkfd/kfd_topology.c and include/uapi/linux/kfd_sysfs.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["KfdGpu", "KfdReading", "gfx_name", "read_kfd"]

_NODES = "class/kfd/kfd/topology/nodes"
_DRIVER_VERSION = "module/amdgpu/version"
_FRAME_BUFFERS = frozenset({"1", "2"})  # heap types: public and private memory of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class KfdGpu:
    """One node of the topology that has SIMDs: a GPU, a die of it, or a partition.

    Attributes:
        node: its number in the topology.
        arch: "gfx942".
        name: the board's name, if its firmware states one.
        pci_id: "1002:74a1".
        uuid: "GPU-0123456789abcdef", as ROCR_VISIBLE_DEVICES takes it; None if it has none.
        memory_bytes: its own memory; None if it states none.
        compute_units: CUs.
        lds_bytes: on-chip memory that a workgroup can have.
        wavefront: lanes of a wave.
        is_apu: it shares the package and the memory of a CPU.
    """

    node: int
    arch: str
    name: str
    pci_id: str
    uuid: str | None
    memory_bytes: int | None
    compute_units: int | None
    lds_bytes: int | None
    wavefront: int | None
    is_apu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KfdReading:
    """What the topology says.

    Attributes:
        is_present: KFD is there, whether or not it lists a GPU.
        gpus: in the order of their nodes.
        num_hidden: nodes that may not be read, as in a container that was given other GPUs.
        driver_version: of amdgpu, where it is not the kernel's own; "" if unknown.
    """

    is_present: bool
    gpus: tuple[KfdGpu, ...] = ()
    num_hidden: int = 0
    driver_version: str = ""


def gfx_name(version: int) -> str:
    """Return the name of a `gfx_target_version`: 90402 is gfx942, 90010 is gfx90a.

    The number has two decimal digits each for minor and stepping; the name has one hexadecimal.
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def read_kfd(sysfs: Path) -> KfdReading:
    """Read the topology.

    Args:
        sysfs: the folder that stands for "/sys".
    """
    folders = sorted((sysfs / _NODES).glob("[0-9]*"), key=lambda folder: int(folder.name))
    gpus: list[KfdGpu] = []
    num_hidden = 0
    for folder in folders:
        properties = _properties(folder / "properties")
        if properties is None:
            num_hidden += 1
        elif _number(properties, "simd_count") and _number(properties, "gfx_target_version"):
            gpus.append(_gpu(sysfs, folder, properties))
    return KfdReading(
        is_present=(sysfs / _NODES).is_dir(),
        gpus=tuple(gpus),
        num_hidden=num_hidden,
        driver_version=_text(sysfs / _DRIVER_VERSION),
    )


def _gpu(sysfs: Path, folder: Path, properties: Mapping[str, str]) -> KfdGpu:
    unique_id = _number(properties, "unique_id")
    lds_kib = _number(properties, "lds_size_in_kb")
    simds_per_cu = _number(properties, "simd_per_cu")
    pci_id = "{:04x}:{:04x}".format(*(_number(properties, k) for k in ("vendor_id", "device_id")))
    minor = _number(properties, "drm_render_minor")
    return KfdGpu(
        node=int(folder.name),
        arch=gfx_name(_number(properties, "gfx_target_version")),
        name=_text(sysfs / f"class/drm/renderD{minor}/device/product_name"),
        pci_id=pci_id,
        uuid=f"GPU-{unique_id:016x}" if unique_id else None,
        memory_bytes=_memory_bytes(folder),
        compute_units=_number(properties, "simd_count") // simds_per_cu if simds_per_cu else None,
        lds_bytes=lds_kib * 1024 or None,
        wavefront=_number(properties, "wave_front_size") or None,
        is_apu=_number(properties, "cpu_cores_count") > 0,
    )


def _memory_bytes(folder: Path) -> int | None:
    banks = (_properties(path) or {} for path in folder.glob("mem_banks/*/properties"))
    sizes = [_number(b, "size_in_bytes") for b in banks if b.get("heap_type") in _FRAME_BUFFERS]
    return sum(sizes) or None


def _properties(path: Path) -> Mapping[str, str] | None:
    """Read lines of "name value"; None if the file may not be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    pairs = (line.partition(" ") for line in text.splitlines())
    return MappingProxyType({name: value.strip() for name, _, value in pairs})


def _number(properties: Mapping[str, str], name: str) -> int:
    text = properties.get(name, "")
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
