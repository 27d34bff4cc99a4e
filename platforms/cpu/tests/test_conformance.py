"""CPU_ATTN and CPU_MLA keep the contract on every instruction set that this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
from attn_cpu_testing import levels, needs_kernels

from attn_conformance.verify import verify
from attn_cpu.isa import forced

pytestmark = needs_kernels


@pytest.mark.parametrize("level", levels())
def test_keeps_the_contract(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    report = verify(f"cpu_attn_levels:held_{level}")
    assert [f"{item.name}: {item.message}" for item in report.failures] == []
    assert report.problems == ()


@pytest.mark.parametrize("level", levels())
def test_latents_keep_the_contract(level: str) -> None:
    with forced(level):
        report = verify("CPU_MLA")
    assert [f"{item.name}: {item.message}" for item in report.failures] == []
    assert report.problems == ()
