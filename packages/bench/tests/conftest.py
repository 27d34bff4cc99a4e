"""Makes the tests' shared module importable, whatever the import mode; shrinks the limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attn_bench import limits, timing

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small calls are slower on several threads of a busy machine than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read, multiplied and flushed fits a test."""
    monkeypatch.setitem(limits._READ_BYTES, "cpu", 4096)
    monkeypatch.setitem(limits._MATMUL_SIZE, "cpu", 16)
    monkeypatch.setitem(timing._FLUSH_BYTES, "cpu", 4096)
