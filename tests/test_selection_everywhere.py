"""What holds of selection with every installed backend, on every preset."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.choice import select
from attn_shared.device import PRESETS
from attn_shared.dtypes import KV_CACHE_DTYPES, KVCacheLayout
from attn_shared.errors import BackendRejectedError, InvalidRequestError, NoBackendError
from attn_shared.mla_prefill import MLAPrefill, prefill_request
from attn_shared.request import AttentionRequest, AttentionType, MLADims, Phase
from attn_shared.selection import Policy, Selection, VerdictStatus
from attn_shared.selector import DEFAULT_SELECTOR

STRICTER: tuple[dict[str, Any], ...] = (
    {"has_sinks": True},
    {"window": (127, 0)},
    {"chunk_size": 128},
    {"softcap": 50.0},
    {"has_alibi": True},
    {"use_mm_prefix": True},
    {"batch_invariant": True},
    {"use_kv_connector": True},
    {"per_head_quant_scales": True},
    {"needs_lse": True},
    {"flash_attn_version": 3},
    {"dcp_size": 2},
    {"pcp_size": 2},
    {"block_size": 48},
    {"kv_layout": KVCacheLayout.HND},
    {"non_causal": True},
    {"per_request_causal": True},
)
HEADS: tuple[dict[str, Any], ...] = (
    {"num_heads": 32, "num_kv_heads": 8, "head_size": 128},
    {"num_heads": 8, "num_kv_heads": 8, "head_size": 64},
    {"num_heads": 12, "num_kv_heads": 4, "head_size": 80},
    {"num_heads": 8, "num_kv_heads": 4, "head_size": 512},
    {"num_heads": 8, "num_kv_heads": 8, "head_size": 192, "head_size_v": 128},
    {"num_heads": 16, "num_kv_heads": 1, "head_size": 576, "mla": MLADims()},
)

CHOSEN, ELIGIBLE = VerdictStatus.CHOSEN, VerdictStatus.ELIGIBLE

many = settings(derandomize=True, max_examples=80, deadline=None)


@st.composite
def requests(draw: st.DrawFn) -> AttentionRequest:
    options: dict[str, Any] = dict(draw(st.sampled_from(HEADS)))
    for change in draw(st.lists(st.sampled_from(STRICTER), max_size=3)):
        options |= change
    return AttentionRequest(
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),  # type: ignore[arg-type]
        kv_cache_dtype=draw(st.sampled_from(KV_CACHE_DTYPES)),
        attn_type=draw(st.sampled_from(AttentionType)),
        phase=draw(st.sampled_from(Phase)),
        **options,
    )


def answer(asked: AttentionRequest, device: str, policy: Policy | None = None) -> Selection:
    place = PRESETS[device]
    inventory = DEFAULT_SELECTOR.inventory(place)
    try:
        return select(asked, place, inventory, policy)
    except NoBackendError as error:
        return held_by(error)


def held_by(error: NoBackendError) -> Selection:
    assert error.selection is not None
    return error.selection


def serving(found: Selection) -> set[str]:
    usable = (VerdictStatus.CHOSEN, VerdictStatus.ELIGIBLE)
    return {verdict.name for verdict in found.verdicts if verdict.status in usable}


@given(asked=requests(), device=st.sampled_from(sorted(PRESETS)))
@many
def test_no_capability_raises_and_every_refusal_has_its_reasons(
    asked: AttentionRequest, device: str
) -> None:
    """On a simulated device everything is installed: unavailable means that something raised."""
    for verdict in answer(asked, device).verdicts:
        assert verdict.status is not VerdictStatus.UNAVAILABLE, verdict
        assert bool(verdict.reasons) == (verdict.status is VerdictStatus.REJECTED)
        for reason in verdict.reasons:
            assert reason.code
            assert reason.value
            assert reason.allowed


@given(
    asked=requests(),
    device=st.sampled_from(sorted(PRESETS)),
    change=st.sampled_from(STRICTER),
)
@many
def test_a_stricter_request_never_gains_a_backend(
    asked: AttentionRequest, device: str, change: dict[str, Any]
) -> None:
    (field,) = change
    plain = AttentionRequest(num_heads=8, num_kv_heads=8, head_size=64)
    if getattr(asked, field) != getattr(plain, field):
        return  # asked for already
    try:
        stricter = asked.with_options(**change)
    except InvalidRequestError:
        return
    assert serving(answer(stricter, device)) <= serving(answer(asked, device))


@given(asked=requests(), device=st.sampled_from(sorted(PRESETS)), data=st.data())
@many
def test_a_named_backend_is_never_replaced(
    asked: AttentionRequest, device: str, data: st.DataObject
) -> None:
    free = answer(asked, device)
    name = data.draw(st.sampled_from([verdict.name for verdict in free.verdicts]))
    place = PRESETS[device]
    policy = Policy(backend=name)
    try:
        found = select(asked, place, DEFAULT_SELECTOR.inventory(place), policy)
    except BackendRejectedError as error:
        found = held_by(error)
    assert found.chosen == (name if name in serving(free) else None)


@pytest.mark.parametrize("device", sorted(PRESETS))
def test_every_preset_serves_a_plain_request(device: str) -> None:
    asked = AttentionRequest(num_heads=32, num_kv_heads=8, head_size=128, dtype="float16")  # type: ignore[arg-type]
    assert answer(asked, device).chosen is not None


FORKED = """
import json, os, sys
from attn_shared.device import PRESETS
from attn_shared.request import AttentionRequest
from attn_shared.selector import DEFAULT_SELECTOR

def answers():
    asked = AttentionRequest(num_heads=32, num_kv_heads=8, head_size=128)
    found = [DEFAULT_SELECTOR.resolve(asked, PRESETS[name]).to_dict() for name in sorted(PRESETS)]
    return json.dumps(found, sort_keys=True)

early = os.pipe()
if sys.argv[1] == "after":
    mine = answers()
child = os.fork()
if child == 0:
    os.close(early[0])
    with os.fdopen(early[1], "w") as pipe:
        pipe.write(answers())
    os._exit(0)
os.close(early[1])
with os.fdopen(early[0]) as pipe:
    theirs = pipe.read()
os.waitpid(child, 0)
print(theirs == answers() and len(theirs) > 1000)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of Unix")
@pytest.mark.parametrize("forked", ["before", "after"])
def test_a_forked_process_gives_the_same_answers(forked: str) -> None:
    """Forked before the parent's first selection, and after it."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, forked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latents_are_decoded_and_prefilled_everywhere(preset: str, dtype: torch.dtype) -> None:
    device = PRESETS[preset]
    inventory = DEFAULT_SELECTOR.inventory(device)
    dims = MLADims(kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    for widths, heads in ((MLADims(), 128), (MLADims(), 8), (dims, 3)):
        request = AttentionRequest(
            num_heads=heads, num_kv_heads=1, head_size=widths.latent_size, mla=widths, dtype=dtype
        )
        found = select(request, device, inventory)
        assert found.backend_cls.capability(device, inventory).is_mla
        prefill = select(prefill_request(request), device, inventory, kind="mla_prefill")
        assert issubclass(prefill.prefill_cls, MLAPrefill)
        assert prefill.verdict("TORCH_SDPA").status in (CHOSEN, ELIGIBLE)
