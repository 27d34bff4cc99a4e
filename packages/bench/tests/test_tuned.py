from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_bench_testing import CELL, CPU, RESULTS

from attn_bench.contenders import BackendContender
from attn_bench.machine import describe_machine, installed_versions
from attn_bench.results import Cell, Results
from attn_bench.tuned import (
    measured_order,
    mismatch,
    plain_request,
    relative_times,
    tuning_plan,
    tuning_workloads,
)
from attn_bench.workloads import Heads, WorkloadPhase
from attn_shared.errors import InvalidInputError
from attn_shared.request import AttentionRequest, Phase

REQUEST = AttentionRequest(num_heads=32, num_kv_heads=8, head_size=128)


def beside(peer: str, anchor_over_peer: float, label: str, phase: str = "decode") -> Cell:
    """TORCH_SDPA takes `anchor_over_peer` times what the peer takes."""
    return replace(CELL, peer=peer, ratio=anchor_over_peer, label=label, phase=phase)


# At decode FAST is 4 and 9 times as fast as the anchor, by the geometric mean 6; LATE half as fast
# at both. At prefill FAST takes twice the anchor's time.
RESULTS_OF_TWO = replace(
    RESULTS,
    cells=(
        beside("FAST", 4.0, "1x1024"),
        beside("LATE", 0.5, "1x1024"),
        beside("FAST", 9.0, "8x1024"),
        beside("LATE", 0.5, "8x1024"),
        beside("FAST", 0.5, "1x512", "prefill"),
    ),
)


def of(results: Results = RESULTS_OF_TWO, **changes: Any) -> tuple[str, ...]:
    return measured_order(results, REQUEST.with_options(**changes))


def test_the_order_is_by_the_geometric_mean_over_the_points_of_the_phase() -> None:
    assert of(phase=Phase.DECODE) == ("FAST", "TORCH_SDPA", "LATE")
    found = relative_times(RESULTS_OF_TWO, REQUEST.with_options(phase=Phase.DECODE))
    assert found == pytest.approx({"FAST": 1.0, "TORCH_SDPA": 6.0, "LATE": 12.0})


def test_each_phase_has_its_own_and_mixed_counts_both() -> None:
    assert of(phase=Phase.PREFILL) == ("TORCH_SDPA", "FAST")
    # over all three points FAST takes (1/4 * 1/9 * 2) ** (1/3) = 0.38 of the anchor's time
    assert of() == ("FAST", "TORCH_SDPA")


def test_one_that_did_not_run_at_every_point_is_left_out() -> None:
    assert "LATE" not in of()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 64},
        {"head_size": 64},
        {"dtype": torch.float16},
        {"kv_cache_dtype": "fp8"},
        {"window": (127, 0)},
        {"softcap": 30.0},
        {"has_sinks": True},
        {"batch_invariant": True},
    ],
)
def test_a_request_that_asks_for_something_else_has_no_order(changes: Any) -> None:
    assert of(**changes) == ()


def test_the_block_size_and_the_layout_are_no_matter() -> None:
    assert of(block_size=64, kv_layout="HND") == of()


def test_a_window_is_what_was_measured() -> None:
    cells = tuple(replace(cell, window=128) for cell in RESULTS_OF_TWO.cells)
    results = replace(RESULTS_OF_TWO, cells=cells)
    assert of(results, window=(127, 0)) == of()
    assert of(results) == ()


@pytest.mark.parametrize("ratio", [0.0, -1.0])
def test_a_ratio_that_no_clock_gives_is_no_run(ratio: float) -> None:
    cells = (beside("FAST", 4.0, "1x1024"), beside("LATE", ratio, "1x1024"))
    assert of(replace(RESULTS, cells=cells), phase=Phase.DECODE) == ("FAST", "TORCH_SDPA")


def test_shared_prefixes_and_cells_without_a_peer_do_not_count() -> None:
    alone = replace(CELL, peer=None, ratio=None)
    shared = replace(CELL, shared_prefix_len=512)
    assert of(replace(RESULTS, cells=(alone, shared))) == ()


def test_the_request_of_a_cell() -> None:
    assert plain_request(CELL) == REQUEST


def test_points_are_decodes_and_prefills_of_one_layer() -> None:
    points = tuning_workloads(Heads(), torch.float16, CPU, kv_cache_dtype="fp8", window=64)
    assert {point.phase for point in points} == {WorkloadPhase.DECODE, WorkloadPhase.PREFILL}
    assert {(p.heads, p.dtype, p.kv_cache_dtype, p.window) for p in points} == {
        (Heads(), torch.float16, "fp8", 64)
    }
    larger = tuning_workloads(Heads(), torch.float16, torch.device("cuda"))
    assert max(point.context for point in larger) >= max(point.context for point in points)


def test_the_anchor_is_what_serves_everywhere() -> None:
    points = tuning_workloads(Heads(), torch.bfloat16, CPU)
    plan = tuning_plan(points, ["X", "TORCH_SDPA", "Y", "X"], CPU, seconds=5.0)
    assert [each.name for each in plan.backends] == ["TORCH_SDPA"]
    assert [each.name for each in plan.peers] == ["X", "Y"]
    assert all(isinstance(each, BackendContender) for each in plan.peers)
    assert tuning_plan(points, ["X", "Y"], CPU).backends[0].name == "X"


@pytest.mark.parametrize("names", [[], ["TORCH_SDPA"], ["X", "X"]])
def test_one_backend_is_no_comparison(names: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="allowed: two that serve the layer"):
        tuning_plan((), names, CPU)


class TestMismatch:
    def here(self, **changes: Any) -> Results:
        return replace(
            RESULTS,
            machine=replace(describe_machine(CPU), **changes),
            versions=installed_versions(),
        )

    def test_this_machine_and_its_software_are_no_mismatch(self) -> None:
        assert mismatch(self.here(), CPU) == ""
        assert mismatch(self.here(notes=("other work ran beside",)), CPU) == ""

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"name": "Other CPU"}, "it is of name Other CPU, and this is "),
            ({"driver": "Linux 2.0"}, "it is of driver Linux 2.0"),
            ({"threads": 999}, "it is of threads 999"),
        ],
    )
    def test_another_device_or_driver_is_said(self, changes: Any, words: str) -> None:
        assert mismatch(self.here(**changes), CPU).startswith(words)

    def test_another_version_is_said(self) -> None:
        versions = {**installed_versions(), "torch": "1.0"}
        told = mismatch(replace(self.here(), versions=versions), CPU)
        assert told == f"it is of torch 1.0, and here is {torch.__version__}"

    def test_a_vendors_library_counts(self) -> None:
        versions = {**installed_versions(), "flash_attn": "2.8"}
        results = replace(self.here(), versions=versions)
        assert mismatch(results, CPU) == "it is of flash_attn 2.8, and here is none"
        assert mismatch(results, CPU, {"flash_attn": "2.8"}) == ""
