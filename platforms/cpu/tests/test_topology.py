"""Threads, cores, nodes and caches, read from trees written for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_cpu.cgroup import CgroupLimits
from attn_cpu.topology import Cache, CpuTopology, NumaNode, allowed_cpus, read_topology

CPU = "sys/devices/system/cpu"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two packages of two cores of two threads: threads 0 and 4 are one core, and so on."""
    files = {
        f"{CPU}/online": "0-7",
        "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB",
        "sys/devices/system/node/online": "0-2",
        "sys/devices/system/node/node0/cpulist": "0-1,4-5",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:        8388608 kB",
        "sys/devices/system/node/node1/cpulist": "2-3,6-7",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:        8388608 kB",
        "sys/devices/system/node/node2/cpulist": "",
    }
    for cpu in range(8):
        core = cpu % 4
        files[f"{CPU}/cpu{cpu}/topology/thread_siblings_list"] = f"{core},{core + 4}"
        files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = str(core // 2)
    for index, (level, kind, size, shared) in enumerate(
        [
            ("1", "Data", "48K", "0,4"),
            ("2", "Unified", "2048K", "0,4"),
            ("3", "Unified", "105M", "0-3"),
        ]
    ):
        folder = f"{CPU}/cpu0/cache/index{index}"
        files |= {
            f"{folder}/level": level,
            f"{folder}/type": kind,
            f"{folder}/size": size,
            f"{folder}/shared_cpu_list": shared,
            f"{folder}/coherency_line_size": "64",
        }
    return write(tmp_path, files)


def test_threads_of_one_core_are_one_core(two_sockets: Path) -> None:
    topology = read_topology(two_sockets, range(8))
    assert (topology.num_threads, topology.physical_cores, topology.sockets) == (8, 4, 2)
    assert topology.usable_cores == 4


@pytest.mark.parametrize(
    ("cpus", "cores", "sockets"), [((0, 4), 1, 1), ((0, 1), 2, 1), ((0, 2, 6), 2, 2), ((3,), 1, 1)]
)
def test_affinity_is_respected(
    two_sockets: Path, cpus: tuple[int, ...], cores: int, sockets: int
) -> None:
    topology = read_topology(two_sockets, cpus)
    assert (topology.physical_cores, topology.sockets) == (cores, sockets)
    assert f"CPU affinity: {len(cpus)} of 8 threads" in topology.notes()


def test_numa_nodes_with_and_without_cpus(two_sockets: Path) -> None:
    assert read_topology(two_sockets, range(8)).numa_nodes == (
        NumaNode(index=0, cpus=(0, 1, 4, 5), memory_bytes=2**33),
        NumaNode(index=1, cpus=(2, 3, 6, 7), memory_bytes=2**33),
        NumaNode(index=2, cpus=(), memory_bytes=None),
    )


def test_caches_of_the_first_usable_cpu(two_sockets: Path) -> None:
    assert read_topology(two_sockets, range(8)).caches == (
        Cache(level=1, kind="data", size_bytes=48 * 1024, line_bytes=64, num_sharing_cpus=2),
        Cache(level=2, kind="unified", size_bytes=2**21, line_bytes=64, num_sharing_cpus=2),
        Cache(level=3, kind="unified", size_bytes=105 * 2**20, line_bytes=64, num_sharing_cpus=4),
    )
    assert read_topology(two_sockets, (1,)).caches == ()


def test_memory_is_the_machines_where_nothing_limits_it(two_sockets: Path) -> None:
    topology = read_topology(two_sockets, range(8))
    assert topology.memory_bytes == 2**34
    assert "memory: the machine's; no control group sets less" in topology.notes()
    assert "NUMA nodes: 3" in topology.notes()


def test_a_control_group_limits_memory_and_cores(two_sockets: Path) -> None:
    mount = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    files = {
        "proc/self/cgroup": "0::/",
        "proc/self/mountinfo": mount,
        "sys/fs/cgroup/cpu.max": "150000 100000",
        "sys/fs/cgroup/memory.max": str(2**32),
    }
    topology = read_topology(write(two_sockets, files), range(8))
    assert topology.memory_bytes == 2**32
    assert topology.machine_memory_bytes == 2**34
    assert (topology.physical_cores, topology.usable_cores) == (4, 2)
    assert any("control group's limit; the machine has 17179869184" in n for n in topology.notes())
    assert "CPU time: the control group's limit, 1.5 CPUs' worth" in topology.notes()


def test_a_limit_above_the_machines_memory_limits_nothing(two_sockets: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/memory.max": str(2**40),
    }
    topology = read_topology(write(two_sockets, files), range(8))
    assert topology.memory_bytes == 2**34
    assert "memory: the machine's; no control group sets less" in topology.notes()


@pytest.mark.parametrize(("quota", "cores"), [(0.1, 1), (1.0, 1), (1.01, 2), (4.0, 4), (64.0, 4)])
def test_a_quota_is_rounded_up_to_whole_cores(quota: float, cores: int) -> None:
    topology = CpuTopology(
        cpus=(0, 1, 2, 3),
        num_machine_cpus=4,
        physical_cores=4,
        sockets=1,
        numa_nodes=(),
        caches=(),
        memory_bytes=None,
        machine_memory_bytes=None,
        limits=CgroupLimits(cpus=quota),
    )
    assert topology.usable_cores == cores


def test_a_system_without_proc_and_sys_says_what_is_unknown(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, (0, 1))
    assert (topology.physical_cores, topology.memory_bytes, topology.caches) == (None, None, ())
    assert topology.usable_cores == 2
    assert "cores unknown on this system: threads are counted" in topology.notes()
    assert "memory size unknown on this system" in topology.notes()


def test_allowed_cpus_are_those_of_this_process() -> None:
    cpus = allowed_cpus()
    assert cpus == tuple(sorted(set(cpus)))
    assert len(cpus) >= 1
