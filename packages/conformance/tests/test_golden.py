from __future__ import annotations

import json
from importlib import resources

import pytest

from attn_conformance.golden import golden_of, shortfalls
from attn_conformance.outcome import Entry, Plan
from attn_conformance.rules.catalogue import MLA_RULES, RULES

SINK = (("sink", "sink=True (allowed: False)"),)
MEMORY = (("memory", "memory=9 bytes (allowed: at most 8 bytes)"),)


def plan_of(*reasons: tuple[tuple[str, str], ...]) -> Plan:
    entries = tuple(
        Entry(index=i, rule="sinks", case=str(i), words="", reasons=item)
        for i, item in enumerate(reasons)
    )
    return Plan(facts={"backend": "X"}, contracts={"sinks": ""}, entries=entries)


def test_as_many_as_promised_is_enough() -> None:
    assert shortfalls(plan_of((), (), SINK), {"sinks": 2}) == []


def test_a_narrowed_capability_is_told_with_its_reason() -> None:
    (sentence,) = shortfalls(plan_of((), SINK), {"sinks": 2})
    assert sentence.startswith("sinks: 1 cases, and X promises 2")
    assert "sink=True (allowed: False)" in sentence


def test_what_the_machine_lacks_is_not_the_backends_fault() -> None:
    assert shortfalls(plan_of((), MEMORY), {"sinks": 2}) == []


def test_rules_that_were_left_out_are_not_missed() -> None:
    assert shortfalls(plan_of(()), {"window": 5}) == []


def test_a_backend_without_a_list_promises_nothing() -> None:
    assert golden_of("NO_SUCH_BACKEND") == {}


@pytest.mark.parametrize(
    "backend",
    ["CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION", "FLASHINFER", "FLASHINFER_TRTLLM"],
)
def test_lists_speak_of_every_rule_and_of_no_other(backend: str) -> None:
    assert set(golden_of(backend)) == {rule.name for rule in RULES}


_UNCAPTURED = {"mla_capture_pointers", "mla_replay"}
_CAUSAL = {"mla_non_causal"}


@pytest.mark.parametrize(
    ("backend", "unpromised"),
    [
        ("TORCH_MLA", _UNCAPTURED),
        ("TRITON_MLA", set()),
        ("CPU_MLA", _UNCAPTURED | {"mla_no_synchronisation"}),
        ("FLASHMLA", _CAUSAL | {"mla_invariance", "mla_fp8"}),
        ("FLASH_ATTN_MLA", _CAUSAL | {"mla_fp8"}),
        ("FLASHINFER_MLA", _CAUSAL | {"mla_invariance", "mla_fp8"}),
        ("CUTLASS_MLA", _CAUSAL | {"mla_invariance", "mla_fp8"}),
        ("ROCM_AITER_MLA", _CAUSAL | {"mla_invariance"}),
    ],
)
def test_lists_of_latents_speak_of_the_rules_of_latents(backend: str, unpromised: set[str]) -> None:
    promised = golden_of(backend)
    assert set(promised) == {rule.name for rule in MLA_RULES}
    assert {rule for rule, count in promised.items() if count == 0} == unpromised


def test_the_whole_contract_is_promised_by_torch_sdpa() -> None:
    """But for what it declares not to do: NaN in tails, and graphs."""
    promised = golden_of("TORCH_SDPA")
    none = {rule for rule, count in promised.items() if count == 0}
    assert none == {"nan_tails", "capture_pointers", "replay", "unsupported_option"}


def test_each_file_is_named_for_its_backend() -> None:
    for path in resources.files("attn_conformance").joinpath("golden").iterdir():
        record = json.loads(path.read_text(encoding="utf-8"))
        assert path.name == f"{record['backend']}.json"
