"""What of the machine this process may use: cores, threads, memory, NUMA nodes, caches."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from attn_cpu.cgroup import CgroupLimits, read_limits
from attn_cpu.files import parse_cpu_list, read_number, read_text

__all__ = ["Cache", "CpuTopology", "NumaNode", "allowed_cpus", "read_topology"]

_CPU_FOLDER = "sys/devices/system/cpu"
_NODE_FOLDER = "sys/devices/system/node"
_MEM_TOTAL = re.compile(r"MemTotal:\s*(\d+) kB")
_SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One node of memory.

    Attributes:
        index: its number.
        cpus: logical CPUs next to it; empty for memory alone (HBM, CXL).
        memory_bytes: its memory, whatever a control group leaves of it.
    """

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One cache as the first usable CPU sees it.

    Attributes:
        level: 1, 2 or 3.
        kind: "data", "instruction" or "unified".
        size_bytes: of one instance.
        line_bytes: of one line.
        num_sharing_cpus: logical CPUs that share an instance.
    """

    level: int
    kind: str
    size_bytes: int
    line_bytes: int | None
    num_sharing_cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTopology:
    """What of the machine this process may use.

    Attributes:
        cpus: logical CPUs that the process may run on.
        num_machine_cpus: logical CPUs of the machine.
        physical_cores: cores that `cpus` are threads of; None if unknown.
        sockets: packages that `cpus` are on; None if unknown.
        numa_nodes: all of them, the machine's.
        caches: from the first level on.
        memory_bytes: what the process may use; None if unknown.
        machine_memory_bytes: what the machine has.
        limits: what the control group leaves.
    """

    cpus: tuple[int, ...]
    num_machine_cpus: int
    physical_cores: int | None
    sockets: int | None
    numa_nodes: tuple[NumaNode, ...]
    caches: tuple[Cache, ...]
    memory_bytes: int | None
    machine_memory_bytes: int | None
    limits: CgroupLimits

    @property
    def num_threads(self) -> int:
        """Logical CPUs that the process may run on."""
        return len(self.cpus)

    @property
    def usable_cores(self) -> int:
        """Cores that can be kept busy: the physical ones, or fewer by the group's quota."""
        cores = self.physical_cores or self.num_threads
        quota = self.limits.cpus
        return cores if quota is None else max(1, min(cores, math.ceil(quota)))

    def notes(self) -> tuple[str, ...]:
        """Say where these figures come from and what limits them."""
        found = [self._memory_note()]
        if self.numa_nodes:
            found.append(f"NUMA nodes: {len(self.numa_nodes)}")
        if self.num_threads < self.num_machine_cpus:
            found.append(f"CPU affinity: {self.num_threads} of {self.num_machine_cpus} threads")
        if self.limits.cpus is not None:
            found.append(f"CPU time: the control group's limit, {self.limits.cpus:g} CPUs' worth")
        if self.physical_cores is None:
            found.append("cores unknown on this system: threads are counted")
        return tuple(found)

    def _memory_note(self) -> str:
        if self.memory_bytes is None:
            return "memory size unknown on this system"
        if self.memory_bytes != self.machine_memory_bytes:
            machine = self.machine_memory_bytes
            return f"memory: the control group's limit; the machine has {machine} bytes"
        return "memory: the machine's; no control group sets less"


def allowed_cpus() -> tuple[int, ...]:
    """Return the logical CPUs that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def read_topology(root: Path, cpus: Collection[int]) -> CpuTopology:
    """Read the topology from /proc and /sys; what they do not say is unknown.

    Args:
        root: the folder that stands for "/".
        cpus: logical CPUs that the process may run on.
    """
    usable = tuple(sorted(cpus))
    limits = read_limits(root)
    machine_memory = _machine_memory(root)
    known = [size for size in (machine_memory, limits.memory_bytes) if size is not None]
    return CpuTopology(
        cpus=usable,
        num_machine_cpus=max(len(_online_cpus(root)), len(usable)),
        physical_cores=_count_cores(root, usable),
        sockets=_count_sockets(root, usable),
        numa_nodes=_numa_nodes(root),
        caches=_caches(root, usable),
        memory_bytes=min(known, default=None),
        machine_memory_bytes=machine_memory,
        limits=limits,
    )


def _online_cpus(root: Path) -> tuple[int, ...]:
    return parse_cpu_list(read_text(root / _CPU_FOLDER / "online") or "")


def _machine_memory(root: Path) -> int | None:
    match = _MEM_TOTAL.search(read_text(root / "proc/meminfo") or "")
    if match:
        return int(match[1]) * 1024
    try:  # macOS
        return (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if root == Path("/") else None
        )
    except (AttributeError, ValueError, OSError):
        return None


def _count_cores(root: Path, cpus: Collection[int]) -> int | None:
    """Count the cores; a kernel names a core by its threads."""
    threads = [_topology_text(root, cpu, "thread_siblings_list") for cpu in cpus]
    return len(set(threads)) if threads and None not in threads else None


def _count_sockets(root: Path, cpus: Collection[int]) -> int | None:
    packages = [_topology_text(root, cpu, "physical_package_id") for cpu in cpus]
    return len(set(packages)) if packages and None not in packages else None


def _topology_text(root: Path, cpu: int, name: str) -> str | None:
    return read_text(root / _CPU_FOLDER / f"cpu{cpu}" / "topology" / name)


def _numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    online = parse_cpu_list(read_text(root / _NODE_FOLDER / "online") or "")
    return tuple(_numa_node(root / _NODE_FOLDER / f"node{index}", index) for index in online)


def _numa_node(folder: Path, index: int) -> NumaNode:
    match = _MEM_TOTAL.search(read_text(folder / "meminfo") or "")
    return NumaNode(
        index=index,
        cpus=parse_cpu_list(read_text(folder / "cpulist") or ""),
        memory_bytes=int(match[1]) * 1024 if match else None,
    )


def _caches(root: Path, cpus: tuple[int, ...]) -> tuple[Cache, ...]:
    if not cpus:
        return ()
    folders = (root / _CPU_FOLDER / f"cpu{cpus[0]}" / "cache").glob("index[0-9]*")
    found = [cache for cache in map(_cache, folders) if cache is not None]
    return tuple(sorted(found, key=lambda cache: (cache.level, cache.kind)))


def _cache(folder: Path) -> Cache | None:
    level, size = read_number(folder / "level"), _size(read_text(folder / "size") or "")
    if level is None or size is None:
        return None
    return Cache(
        level=level,
        kind=(read_text(folder / "type") or "unified").lower(),
        size_bytes=size,
        line_bytes=read_number(folder / "coherency_line_size"),
        num_sharing_cpus=len(parse_cpu_list(read_text(folder / "shared_cpu_list") or "")) or 1,
    )


def _size(text: str) -> int | None:
    number, unit = text[:-1], text[-1:]
    if not number.isdecimal() or unit not in _SIZE_UNITS:
        return None
    return int(number) * _SIZE_UNITS[unit]
