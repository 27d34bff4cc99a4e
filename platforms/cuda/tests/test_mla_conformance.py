"""The contract's rules for latents through each library's stub, which has the real signature.

Rules about what a backend makes of a batch run here; those that only compute more of the same run
on the device that the kernels are for.
"""

from __future__ import annotations

import pytest
from mla_backends import BACKENDS, loaded

from attn_conformance.outcome import Status
from attn_conformance.stubs.suite import run_rules

RULES = (
    *("mla_drafts", "mla_split", "mla_lse", "mla_fp8", "mla_padded_requests", "mla_empty_batch"),
    *("mla_unread", "mla_padded_blocks", "mla_graph_level", "mla_capture_pointers", "mla_replay"),
    *("mla_layer", "mla_unserved", "mla_other_blocks", "mla_decode_input"),
)


@pytest.mark.parametrize("name", BACKENDS)
def test_each_library_keeps_the_contract(name: str) -> None:
    with loaded(BACKENDS[name]) as (recorder, subject):
        outcomes = list(run_rules(subject, RULES))
    failed = {f"{o.rule} {o.name}": o.message for o in outcomes if o.status is Status.FAILED}
    assert failed == {}
    assert sum(o.status is Status.PASSED for o in outcomes) > 40
    assert recorder.calls
