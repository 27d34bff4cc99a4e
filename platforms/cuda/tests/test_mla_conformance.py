"""The contract's rules for latents through each library's stub, which has the real signature."""

from __future__ import annotations

import pytest
from mla_backends import BACKENDS, loaded

from attn_conformance.outcome import Status
from attn_conformance.stubs.suite import run_rules


@pytest.mark.parametrize("name", BACKENDS)
def test_each_library_keeps_the_contract(name: str) -> None:
    with loaded(BACKENDS[name]) as (recorder, subject):
        outcomes = list(run_rules(subject))
    failed = {f"{o.rule} {o.name}": o.message for o in outcomes if o.status is Status.FAILED}
    assert failed == {}
    assert sum(o.status is Status.PASSED for o in outcomes) > 20
    assert recorder.calls
