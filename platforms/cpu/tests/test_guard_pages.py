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


_FREED = """
import torch
from test_cpu_attn import Step

for held in (0, 64):
    step = Step([33, 20], [1, 4])
    plan, cache = step.layer.plan(step.common), step.cache
    rows, slots = torch.zeros(5, 2, 64), torch.arange(5)
    calls = [
        lambda: step.layer.forward(step.query, None, None, cache, plan),
        lambda: step.layer.forward(step.query, None, None, cache, plan, lse=torch.zeros(6, 5)),
        lambda: step.layer.impl.do_kv_cache_update(step.layer, rows, rows, cache, slots),
    ]
    for call in calls:
        call()
    cache.untyped_storage().resize_(held)
    for call in calls:
        try:
            call()
        except ValueError as error:
            print(error)
query = step.query
query.untyped_storage().resize_(0)
arguments = (query, None, None, step.layer.allocate(5), plan)
try:
    step.layer.forward(*arguments)
except ValueError as error:
    print(error)
"""


def test_memory_that_was_freed_behind_a_tensor_is_refused() -> None:
    done = _run(["-c", _FREED])
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    said = done.stdout.splitlines()
    assert len(said) == 7, said
    assert all("storage" in line for line in said), said
