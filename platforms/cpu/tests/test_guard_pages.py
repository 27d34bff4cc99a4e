"""The kernels read and write nothing outside the tensors, and no block that no request names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attn_cpu_testing import levels, needs_kernels

HERE = Path(__file__).parent

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(sys.platform == "win32", reason="pages are protected by mprotect"),
]


def _run(code: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE), *sys.path])
    return subprocess.run(
        [sys.executable, *code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_nothing_outside_is_touched() -> None:
    done = _run([str(HERE / "guarded_memory.py")])
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr[-3000:]}"
    ran = [line.split()[0] for line in done.stdout.splitlines()]
    assert ran == [*levels(), "writes"]


def test_a_guard_page_does_stop_who_touches_it() -> None:
    code = (
        "import torch\n"
        "from guarded_memory import guarded\n"
        "rows = guarded(torch.ones(3, 8), at_end=True)\n"
        "assert rows.sum() == 24\n"
        "rows.as_strided((4, 8), (8, 1)).sum()\n"
    )
    assert _run(["-c", code]).returncode < 0
