"""The kernel's topology of AMD GPUs, from trees written for the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from attn_rocm.kfd import gfx_name, read_kfd

WriteKfd = Callable[..., Path]
Nodes = Mapping[str, dict[str, int]]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90006, "gfx906"),
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (100302, "gfx1032"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
        (120500, "gfx1250"),
    ],
)
def test_target_versions_are_named_as_the_compiler_does(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_an_mi300x_beside_its_cpu(write_kfd: WriteKfd, nodes: Nodes) -> None:
    reading = read_kfd(write_kfd(nodes["cpu"], nodes["mi300x"]))
    assert reading.is_present
    (gpu,) = reading.gpus
    assert (gpu.node, gpu.arch, gpu.pci_id) == (1, "gfx942", "1002:74a1")
    assert (gpu.compute_units, gpu.lds_bytes, gpu.wavefront) == (304, 65536, 64)
    assert gpu.memory_bytes == 192 * 2**30
    assert gpu.uuid == "GPU-a0b0c0d0e0f00102"
    assert (gpu.name, gpu.is_apu) == ("", False)


@pytest.mark.parametrize(
    ("part", "arch", "units", "gib"),
    [("mi250", "gfx90a", 104, 64), ("rx7900xtx", "gfx1100", 96, 24)],
)
def test_other_parts(
    write_kfd: WriteKfd, nodes: Nodes, part: str, arch: str, units: int, gib: int
) -> None:
    (gpu,) = read_kfd(write_kfd(nodes[part])).gpus
    assert (gpu.arch, gpu.compute_units, gpu.memory_bytes) == (arch, units, gib * 2**30)


def test_nodes_are_in_the_order_of_their_numbers(write_kfd: WriteKfd, nodes: Nodes) -> None:
    gpus = read_kfd(write_kfd(*[nodes["mi300x"]] * 11)).gpus
    assert [gpu.node for gpu in gpus] == list(range(11))


def test_nodes_that_may_not_be_read_are_counted(write_kfd: WriteKfd, nodes: Nodes) -> None:
    reading = read_kfd(write_kfd(nodes["cpu"], None, nodes["mi300x"]))
    assert (len(reading.gpus), reading.num_hidden) == (1, 1)


def test_the_boards_name_and_the_drivers_version(write_kfd: WriteKfd, nodes: Nodes) -> None:
    sysfs = write_kfd(nodes["mi300x"])
    (sysfs / "class/drm/renderD128/device").mkdir(parents=True)
    (sysfs / "class/drm/renderD128/device/product_name").write_text("AMD Instinct MI300X OAM\n")
    (sysfs / "module/amdgpu").mkdir(parents=True)
    (sysfs / "module/amdgpu/version").write_text("6.12.12\n")
    reading = read_kfd(sysfs)
    assert reading.gpus[0].name == "AMD Instinct MI300X OAM"
    assert reading.driver_version == "6.12.12"


def test_an_apu_shares_its_memory(write_kfd: WriteKfd, nodes: Nodes) -> None:
    apu = {**nodes["rx7900xtx"], "cpu_cores_count": 16, "gfx_target_version": 110501}
    (gpu,) = read_kfd(write_kfd(apu)).gpus
    assert (gpu.arch, gpu.is_apu, gpu.memory_bytes) == ("gfx1151", True, None)


def test_properties_that_are_missing_are_unknown(write_kfd: WriteKfd) -> None:
    (gpu,) = read_kfd(write_kfd({"simd_count": 4, "gfx_target_version": 90402})).gpus
    assert (gpu.compute_units, gpu.lds_bytes, gpu.wavefront, gpu.uuid) == (None, None, None, None)


def test_without_kfd(tmp_path: Path) -> None:
    reading = read_kfd(tmp_path)
    assert (reading.is_present, reading.gpus, reading.num_hidden) == (False, (), 0)
