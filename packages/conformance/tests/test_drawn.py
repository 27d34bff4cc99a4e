from __future__ import annotations

import torch
from conformance_backends import Blocks16

from attn_conformance.drawn import drawn_cases
from attn_conformance.fit import Fit
from attn_conformance.reference_backend import REFERENCE_CAPABILITY
from attn_shared.device import preset


def test_the_same_cases_are_drawn_every_time_and_none_twice() -> None:
    first, again = (drawn_cases(Fit(REFERENCE_CAPABILITY), 60) for _ in range(2))
    assert first == again
    unnamed = [case.with_fields(name="") for case in first]
    assert all(case not in unnamed[:i] for i, case in enumerate(unnamed))
    assert [case.name for case in first] == [str(i) for i in range(len(first))]


def test_what_is_drawn_is_served() -> None:
    facts = preset("genericcpu")
    for capability in (REFERENCE_CAPABILITY, Blocks16.served):
        for case in drawn_cases(Fit(capability), 60):
            assert capability.check(case.request, facts) == (), str(case)


def test_many_kinds_are_drawn() -> None:
    cases = drawn_cases(Fit(REFERENCE_CAPABILITY), 300)
    assert {case.dtype for case in cases} == {torch.float32, torch.bfloat16, torch.float16}
    assert {case.block_size for case in cases} >= {1, 2, 3, 16, 256}
    assert {case.num_heads // case.num_kv_heads for case in cases} == {1, 3, 5, 6, 7, 8, 20}
    assert any(0 in case.seq_lens for case in cases)
    assert any(case.has_sinks and case.window != (None, None) for case in cases)
    assert any(isinstance(case.causal, tuple) for case in cases)
    assert any(isinstance(case.k_scale, tuple) for case in cases)
