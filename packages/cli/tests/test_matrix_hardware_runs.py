from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from matrix_testing import run_of

from attn_cli.matrix.hardware_runs import (
    HardwareRun,
    cpu_level,
    known_runs,
    runs_text,
    with_run,
)
from attn_shared.arch import parse_arch
from attn_shared.device import preset
from attn_shared.errors import InvalidInputError
from attn_shared.known_backends import KNOWN_BACKENDS


def report(**changes: Any) -> dict[str, Any]:
    """What `attn verify --json` prints, as far as it matters."""
    facts = {
        "backend": "TORCH_SDPA",
        "asked_for": "TORCH_SDPA",
        "source": "attn-torch 0.1.0",
        "device": "cuda:0: NVIDIA H200 (sm_90)",
        "isa": "",
        "torch": "2.11.0+cu130",
        "python": "3.12.1",
        "depth": "quick",
        **changes.pop("facts", {}),
    }
    total = {"run": 31, "passed": 30, "failed": 0, "expected": 1, "excluded": 9}
    return {"ok": True, "facts": facts, "total": total, "problems": [], **changes}


def from_report(**changes: Any) -> HardwareRun:
    return HardwareRun.from_report(report(**changes), date="2026-02-03", record="a file")


def test_a_report_becomes_a_run() -> None:
    run = from_report()
    assert run == HardwareRun(
        backend="TORCH_SDPA",
        arch="sm_90",
        device="NVIDIA H200",
        date="2026-02-03",
        versions=(("torch", "2.11.0+cu130"), ("python", "3.12.1"), ("attn-torch", "0.1.0")),
        what="conformance suite, depth quick",
        passed=30,
        failed=0,
        expected=1,
        excluded=9,
        record="a file",
    )
    assert run.counts() == "30 passed, 1 expected, 9 excluded"


def test_a_cpus_run_keeps_its_level() -> None:
    facts = {"device": "cpu: Some (odd) CPU (x86_64)", "isa": "fma avx2 avx512f"}
    run = from_report(facts=facts)
    assert (run.device, run.arch, run.cpu_level) == ("Some (odd) CPU", "x86_64", "avx512f")
    with pytest.raises(InvalidInputError, match="isa of the report is ''"):
        from_report(facts={**facts, "isa": ""})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ok": False}, "allowed: a run that passed"),
        ({"total": {"passed": 0, "failed": 0}}, "0 passed cases"),
        ({"facts": {"device": "somewhere"}}, "'somewhere'"),
        ({"total": {}}, "without 'failed'|without 'passed'"),
    ],
)
def test_what_cannot_be_counted_on_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        from_report(**changes)


def test_what_is_no_report_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="attn verify NAME --json"):
        HardwareRun.from_report({"error": {}}, date="2026-02-03", record="")


@pytest.mark.parametrize(
    ("isa", "level"),
    [
        (("avx2", "fma"), "avx2"),
        (("avx2", "avx512f", "amx_bf16"), "amx_bf16"),
        (("asimd", "sve"), "sve"),
        ((), None),
    ],
)
def test_levels_of_cpus(isa: tuple[str, ...], level: str | None) -> None:
    assert cpu_level(isa) == level


@pytest.mark.parametrize(
    ("run", "covered", "others"),
    [
        (run_of("X"), ["h100", "h200"], ["a100", "b200", "mi300x", "spr"]),
        (run_of("X", arch="x86_64", cpu_level="amx_bf16"), ["spr"], ["genericcpu", "graviton4"]),
        (run_of("X", arch="x86_64", cpu_level="avx2"), ["genericcpu"], ["spr"]),
    ],
)
def test_a_run_covers_its_architecture_and_level_alone(
    run: HardwareRun, covered: list[str], others: list[str]
) -> None:
    assert all(run.covers(preset(name)) for name in covered)
    assert not any(run.covers(preset(name)) for name in others)


def test_runs_survive_the_file_in_an_order_of_their_own() -> None:
    runs = [run_of("Y"), run_of("X", cpu_level="avx2", arch="x86_64"), run_of("X", excluded=3)]
    text = runs_text(runs)
    assert known_runs(text) == (runs[2], runs[1], runs[0])
    assert runs_text(reversed(runs)) == text


def test_a_later_run_takes_the_place_of_the_same() -> None:
    first, other = run_of("X"), run_of("Y")
    later = replace(first, date="2026-03-01", passed=99)
    assert with_run([first, other], later) == [other, later]
    assert with_run([first], replace(later, what="less")) == [first, replace(later, what="less")]


@pytest.mark.parametrize(
    ("run", "words"),
    [({"backend": "X"}, "versions"), ({**run_of("X").to_dict(), "odd": 1}, "odd")],
)
def test_runs_with_other_fields_are_refused(run: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        known_runs(json.dumps({"schema_version": 1, "runs": [run]}))


def test_another_version_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="schema_version of the hardware runs is 2"):
        known_runs('{"schema_version": 2, "runs": []}')


def test_the_runs_on_record_are_of_known_backends_and_architectures() -> None:
    runs = known_runs()
    assert runs
    assert runs_text(runs) == runs_text(known_runs(runs_text(runs)))
    for run in runs:
        assert run.backend in KNOWN_BACKENDS
        assert parse_arch(run.arch).canonical == run.arch
        assert run.passed > 0
        assert run.record
