from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attn_bench_testing import CPU, workload

from attn_bench import memory
from attn_bench.counting import count
from attn_bench.memory import available_bytes, bytes_needed, shortage


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 MiB available, in no control group."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999 kB\nMemAvailable:    8192 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def in_group(folder: Path, limit: str, used: int, inactive: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def test_what_the_machine_says(machine: Path) -> None:
    assert available_bytes(CPU) == 8 * 2**20


@pytest.mark.parametrize(
    ("limit", "expected"), [("5000", 5000 - 3000 + 500), ("max", 8 * 2**20), ("2000", 0)]
)
def test_a_control_group_may_allow_less(machine: Path, limit: str, expected: int) -> None:
    in_group(machine, limit, used=3000, inactive=500)
    assert available_bytes(CPU) == expected


def test_where_nothing_is_known_nothing_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "meminfo").unlink()
    assert available_bytes(CPU) is None
    assert shortage(CPU, [2**60]) == ""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert available_bytes(torch.device("meta")) is None


def test_a_devices_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(mem_get_info=lambda device: (123, 456))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert available_bytes(torch.device("cuda")) == 123


def test_a_shortage_says_both_numbers(machine: Path) -> None:
    assert shortage(CPU, [3 * 2**20, 3 * 2**20]) == ""
    words = shortage(CPU, [7 * 2**20])
    assert "needs about 0.0 GiB, and 0.0 GiB are free on cpu" in words


def test_need_grows_with_copies_and_contenders() -> None:
    batch = workload()
    work = count(batch)
    one = bytes_needed(batch, 1, 1)
    assert bytes_needed(batch, 1, 3) - one == 2 * work.num_bytes
    assert bytes_needed(batch, 2, 1) > one >= work.num_bytes
