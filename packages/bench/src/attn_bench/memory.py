"""Whether a cell fits into memory, before it is tried."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from attn_bench.counting import count
from attn_bench.workloads import Workload

__all__ = ["available_bytes", "bytes_needed", "shortage"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_SHARE = 0.8  # of what is available; the rest is for what cannot be counted ahead


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device, or of the machine for a CPU; None if unknown."""
    if device.type == "cpu":
        return _host_bytes()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    return int(module.mem_get_info(device)[0])


def _host_bytes() -> int | None:
    found = [value for value in (_meminfo_bytes(), _cgroup_bytes()) if value is not None]
    return min(found, default=None)


def _meminfo_bytes() -> int | None:
    try:
        text = _MEMINFO.read_text(encoding="ascii")
    except OSError:
        return None  # no Linux
    fields = (line.split() for line in text.splitlines())
    return next((int(words[1]) * 1024 for words in fields if words[0] == "MemAvailable:"), None)


def _cgroup_bytes() -> int | None:
    try:
        limit, used, details = (
            (_CGROUP / name).read_text(encoding="ascii")
            for name in ("memory.max", "memory.current", "memory.stat")
        )
    except OSError:
        return None  # no control group, or one of the older kind
    if limit.strip() == "max":
        return None
    fields = dict(line.split() for line in details.splitlines())
    given_back = int(fields.get("inactive_file", 0))  # the kernel drops these pages first
    return max(0, int(limit) - int(used) + given_back)


def bytes_needed(workload: Workload, num_contenders: int, num_copies: int) -> int:
    """Return a guess of what the contenders take.

    Each has its copies of cache, query and output, and may gather all keys once more while it
    runs; the reference holds one request's keys in float64, twice.
    """
    work = count(workload)
    heads = workload.heads
    scratch = work.kv_bytes + 4 * work.io_bytes
    width = heads.head_size + heads.value_size
    reference = 2 * 8 * workload.context * heads.num_kv_heads * width
    return num_contenders * (num_copies * work.num_bytes + scratch) + reference


def shortage(device: torch.device, parts: Iterable[int]) -> str:
    """Say that these bytes do not fit, or nothing."""
    available, needed = available_bytes(device), sum(parts)
    if available is None or needed <= _SHARE * available:
        return ""
    return (
        f"needs about {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free on "
        f"{device} (of which it may take {_SHARE:.0%})"
    )
