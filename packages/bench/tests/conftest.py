"""Makes the tests' shared module importable, whatever the import mode; shrinks the limits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attn_bench import limits, timing

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read, multiplied and flushed fits a test."""
    monkeypatch.setitem(limits._READ_BYTES, "cpu", 4096)
    monkeypatch.setitem(limits._MATMUL_SIZE, "cpu", 16)
    monkeypatch.setitem(timing._FLUSH_BYTES, "cpu", 4096)
