from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_shared import AttentionRequest, large_pages
from attn_shared.kv_cache import spec_for
from attn_shared.large_pages import advise_large_pages

_SMAPS = Path("/proc/self/smaps")
_HAS_ADVICE = (
    hasattr(mmap, "MADV_HUGEPAGE") and Path("/sys/kernel/mm/transparent_hugepage").is_dir()
)
needs_advice = pytest.mark.skipif(not _HAS_ADVICE, reason="a system without large pages on demand")


def flags_at(address: int) -> list[str]:
    """Return what the kernel notes of the mapping that holds an address."""
    is_inside = False
    for line in _SMAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) <= address < int(found[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@needs_advice
def test_the_kernel_notes_the_advice() -> None:
    tensor = torch.empty(8 * 2**20, dtype=torch.uint8)
    middle = tensor.data_ptr() + tensor.numel() // 2
    assert advise_large_pages(tensor)
    assert "hg" in flags_at(middle)


@needs_advice
def test_a_cache_lies_in_large_pages_and_is_zero() -> None:
    request = AttentionRequest(num_heads=8, num_kv_heads=8, head_size=128, dtype=torch.float32)
    cache = spec_for(request, block_size=128).allocate(8, "cpu")
    assert cache.numel() * 4 == 8 * 2**20
    assert "hg" in flags_at(cache.data_ptr() + 4 * 2**20)
    assert not cache.any()


def test_what_has_no_such_pages() -> None:
    assert not advise_large_pages(torch.empty(16))
    assert not advise_large_pages(torch.empty(8 * 2**20, device="meta"))
    with FakeTensorMode():
        assert not advise_large_pages(torch.empty(8 * 2**20))


def test_a_system_without_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not advise_large_pages(torch.empty(8 * 2**20, dtype=torch.uint8))


def test_a_system_that_forbids_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's filter of system calls does, or a kernel without large pages."""

    class Libc:
        asked = 0

        def madvise(self, *_arguments: object) -> int:
            Libc.asked += 1
            return -1

    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(large_pages.ctypes, "CDLL", lambda _name: Libc())
    assert not advise_large_pages(torch.empty(8 * 2**20, dtype=torch.uint8))
    request = AttentionRequest(num_heads=8, num_kv_heads=8, head_size=128, dtype=torch.float32)
    assert not spec_for(request, block_size=128).allocate(8, "cpu").any()
    assert Libc.asked == 2
