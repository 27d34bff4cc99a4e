"""Limits of control groups, v1, v2 and both at once, in trees written for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_cpu.cgroup import CgroupLimits, parse_cgroups, parse_mounts, read_limits

V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_CPU_MOUNT = "31 24 0:27 {root} /sys/fs/cgroup/cpu rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY_MOUNT = "32 24 0:28 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
DISK_MOUNT = "24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_v2_quota_and_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/app\n",
        "proc/self/mountinfo": DISK_MOUNT + V2_MOUNT,
        "sys/fs/cgroup/app/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/app/memory.max": "1073741824\n",
    }
    assert read_limits(write(tmp_path, files)) == CgroupLimits(cpus=1.5, memory_bytes=2**30)


def test_v2_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/app\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/slice/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/slice/memory.max": "max\n",
        "sys/fs/cgroup/slice/app/cpu.max": "max 100000\n",
        "sys/fs/cgroup/slice/app/memory.max": "4096\n",
    }
    assert read_limits(write(tmp_path, files)) == CgroupLimits(cpus=2.0, memory_bytes=4096)


def test_v1_quota_and_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/job\n",
        "proc/self/mountinfo": V1_CPU_MOUNT.format(root="/") + V1_MEMORY_MOUNT.format(root="/"),
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "8589934592\n",
    }
    assert read_limits(write(tmp_path, files)) == CgroupLimits(cpus=0.5, memory_bytes=2**33)


def test_v1_unlimited_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/\n",
        "proc/self/mountinfo": V1_CPU_MOUNT.format(root="/") + V1_MEMORY_MOUNT.format(root="/"),
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert read_limits(write(tmp_path, files)) == CgroupLimits()


def test_v1_in_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/1f\n",
        "proc/self/mountinfo": V1_CPU_MOUNT.format(root="/docker/1f"),
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert read_limits(write(tmp_path, files)).cpus == 3.0


def test_a_path_that_only_the_host_has_falls_to_the_mounted_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/1f\n",
        "proc/self/mountinfo": V1_MEMORY_MOUNT.format(root="/somewhere/else"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2048\n",
    }
    assert read_limits(write(tmp_path, files)).memory_bytes == 2048


def test_hybrid_reads_v1_and_v2(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n0::/\n",
        "proc/self/mountinfo": V1_CPU_MOUNT.format(root="/")
        + V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/unified/memory.max": "65536\n",
    }
    assert read_limits(write(tmp_path, files)) == CgroupLimits(cpus=4.0, memory_bytes=65536)


def test_no_control_groups_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == CgroupLimits()


@pytest.mark.parametrize("text", ["", "nonsense", "1:cpu", "x:cpu:/a", "0::relative"])
def test_lines_that_are_no_groups_are_passed_over(text: str) -> None:
    assert parse_cgroups(text) == {}


@pytest.mark.parametrize("text", ["", "a b c", DISK_MOUNT, "1 2 3 / /x - cgroup2", " - cgroup x y"])
def test_lines_that_are_no_hierarchies_are_passed_over(text: str) -> None:
    assert parse_mounts(text) == ()
