from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attn_bench_testing import workload

from attn_bench.planning import Asked, make_plan
from attn_bench.results import Settings
from attn_bench.sets import SETS
from attn_bench.traces import write_trace
from attn_bench.workloads import WorkloadPhase
from attn_shared.errors import AttnError, BackendNotProvidedError, UnknownNameError


def test_defaults() -> None:
    plan = make_plan(Asked())
    assert plan.workloads == SETS["quick"]
    assert [backend.name for backend in plan.backends] == ["auto"]
    assert plan.peers == []
    assert plan.settings == Settings(rounds=15, cache_state="cold", graph=False)


def test_every_set_for_every_layer_and_dtype() -> None:
    asked = Asked(
        workloads=["prefill"],
        heads=["32/8x128", "9/3x64"],
        dtypes=["float32", "bf16"],
        kv_cache_dtype="fp8",
        block_size=32,
    )
    plan = make_plan(asked)
    assert len(plan.workloads) == 3 * 2 * 2
    shapes = {(str(w.heads), w.dtype) for w in plan.workloads}
    assert len(shapes) == 4
    assert {w.kv_cache_dtype for w in plan.workloads} == {"fp8"}
    assert {w.block_size for w in plan.workloads} == {32}


def test_what_is_not_asked_stays_each_workloads_own() -> None:
    plan = make_plan(Asked(workloads=["h200-shapes"]))
    assert plan.workloads == SETS["h200-shapes"]


def test_a_window_an_lse_and_own_outputs_for_all() -> None:
    asked = Asked(workloads=["decode"], window=512, returns_lse=True, own_output=True)
    for found in make_plan(asked).workloads:
        assert (found.window, found.returns_lse, found.own_output) == (512, True, True)


def test_a_trace_keeps_its_own_layer(tmp_path: Path) -> None:
    step = workload(phase=WorkloadPhase.TRACE, label="noon")
    write_trace(tmp_path / "t.jsonl", (step,))
    asked = Asked(traces=[tmp_path / "t.jsonl"], heads=["32/8x128"])
    assert make_plan(asked).workloads == (step,)
    both = make_plan(Asked(traces=[tmp_path / "t.jsonl"], workloads=["decode"]))
    assert both.workloads == (*SETS["decode"], step)


def test_names_become_contenders_and_words_a_device() -> None:
    asked = Asked(backends=["TORCH_SDPA"], peers=["torch.sdpa", "FLEX_ATTENTION"], device="cpu")
    plan = make_plan(asked)
    assert [peer.name for peer in plan.peers] == ["torch.sdpa", "FLEX_ATTENTION"]
    assert plan.device == torch.device("cpu")
    assert [(w, b.name) for w, b in plan.groups()] == [(w, "TORCH_SDPA") for w in SETS["quick"]]


@pytest.mark.parametrize(
    ("asked", "complaint", "code"),
    [
        ({"backends": ["TORCH_SPDA"]}, "TORCH_SPDA", 2),
        ({"backends": ["FLASHMLA_SPARSE"]}, "FLASHMLA_SPARSE", 3),
        ({"peers": ["torch.spda"]}, "torch.spda", 2),
        ({"peers": ["TORCH_SPDA"]}, "TORCH_SPDA", 2),
        ({"workloads": ["decod"]}, "decod", 2),
        ({"heads": ["32"]}, "heads is '32'", 2),
        ({"dtypes": ["int3"]}, "int3", 2),
        ({"kv_cache_dtype": "fp9"}, "fp9", 2),
        ({"block_size": 0}, "block_size", 2),
        ({"window": 0}, "window", 2),
        ({"peers": ["flashinfer"]}, "needs flashinfer-python, which is not installed", 4),
        ({"device": "tpu9:x"}, "device is 'tpu9:x'", 2),
        ({"device": "xpu"}, "no available platform has a torch device xpu", 3),
        ({"seconds": 0.0}, "seconds is 0.0", 2),
        ({"traces": [Path("nowhere.jsonl")]}, "nowhere.jsonl", 2),
    ],
)
def test_what_cannot_be_is_refused_with_its_code(
    asked: dict[str, Any], complaint: str, code: int
) -> None:
    with pytest.raises(AttnError, match=complaint) as caught:
        make_plan(Asked(**asked))
    assert caught.value.exit_code == code


def test_an_unknown_peer_is_told_of_direct_calls_and_backends() -> None:
    with pytest.raises(UnknownNameError, match="unknown peer 'nosuch'") as caught:
        make_plan(Asked(peers=["nosuch"]))
    for name in ("TORCH_SDPA", "torch.sdpa", "vllm-cpu"):
        assert name in str(caught.value)
    with pytest.raises(BackendNotProvidedError, match="'HPC_ATTN' is known"):
        make_plan(Asked(peers=["HPC_ATTN"]))
