"""What a control group leaves a process of the machine's time and memory (Linux, v1 and v2).

A limit holds for a group and all below it, so that the smallest on the way up counts. The formats
are those of the kernel's documentation, admin-guide/cgroup-v1 and admin-guide/cgroup-v2, and of
proc_pid_cgroup(5) and proc_pid_mountinfo(5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from attn_cpu.files import read_number, read_text

__all__ = ["CgroupLimits", "CgroupMount", "parse_cgroups", "parse_mounts", "read_limits"]

_V1_UNLIMITED = 2**60  # v1 writes no word for "no limit", but a number near 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """Limits of this process; None where there is none.

    Attributes:
        cpus: CPUs' worth of time, 1.5 for one and a half.
        memory_bytes: memory of all processes of the group.
    """

    cpus: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMount:
    """Where a hierarchy of control groups can be read.

    Attributes:
        controllers: those of a v1 hierarchy; empty for v2.
        root: the group that is mounted there, "/" unless inside a container.
        location: the mount point.
    """

    controllers: frozenset[str]
    root: str
    location: str


def parse_cgroups(text: str) -> dict[str, str]:
    """Read /proc/self/cgroup: controller -> path of this process's group; "" is v2's."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number.isdecimal() and path.startswith("/"):
            groups.update(dict.fromkeys(names.split(","), path))
    return groups


def parse_mounts(text: str) -> tuple[CgroupMount, ...]:
    """Read the hierarchies of control groups from /proc/self/mountinfo."""
    return tuple(mount for line in text.splitlines() for mount in _parse_mount(line))


def _parse_mount(line: str) -> Iterator[CgroupMount]:
    before, _, after = line.partition(" - ")
    place, filesystem = before.split(), after.split()
    if len(place) < 5 or len(filesystem) < 3 or filesystem[0] not in ("cgroup", "cgroup2"):
        return
    is_v2 = filesystem[0] == "cgroup2"
    yield CgroupMount(
        controllers=frozenset() if is_v2 else frozenset(filesystem[2].split(",")),
        root=place[3],
        location=place[4],
    )


def read_limits(root: Path) -> CgroupLimits:
    """Return the limits of this process.

    Args:
        root: the folder that stands for "/".
    """
    groups = parse_cgroups(read_text(root / "proc/self/cgroup") or "")
    mounts = parse_mounts(read_text(root / "proc/self/mountinfo") or "")
    cpu_folders = [*_folders(root, groups, mounts, "cpu")]
    memory_folders = [*_folders(root, groups, mounts, "memory")]
    return CgroupLimits(
        cpus=min(filter(None, map(_cpus_of, cpu_folders)), default=None),
        memory_bytes=min(filter(None, map(_memory_of, memory_folders)), default=None),
    )


def _folders(
    root: Path, groups: dict[str, str], mounts: tuple[CgroupMount, ...], controller: str
) -> Iterator[Path]:
    """Yield the folders of the process's group and of those above it, v1's and v2's."""
    for mount in mounts:
        name = controller if mount.controllers else ""
        if name in groups and (not name or name in mount.controllers):
            yield from _chain(root / mount.location.lstrip("/"), groups[name], mount.root)


def _chain(mounted: Path, group: str, mounted_root: str) -> Iterator[Path]:
    # A container may see its own group as the mount point, under a path that only the host has.
    path = PurePosixPath(group)
    below = path.relative_to(mounted_root) if path.is_relative_to(mounted_root) else "."
    folder = mounted / below
    yield folder
    while folder != mounted:
        folder = folder.parent
        yield folder


def _cpus_of(folder: Path) -> float | None:
    text = read_text(folder / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return int(quota) / int(period) if quota.isdecimal() else None
    quota_us = read_number(folder / "cpu.cfs_quota_us")
    period_us = read_number(folder / "cpu.cfs_period_us")
    if quota_us is None or not period_us or quota_us < 0:
        return None
    return quota_us / period_us


def _memory_of(folder: Path) -> int | None:
    limit = read_number(folder / "memory.max")
    if limit is None:
        limit = read_number(folder / "memory.limit_in_bytes")
    return limit if limit is not None and 0 < limit < _V1_UNLIMITED else None
