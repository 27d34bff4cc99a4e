"""Wrappers: which kernels, how much scratch, who holds them, and when they are planned again."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from fi_testing import H200, fi_layer, fi_stubbed

from attn_cuda import _fi_loaded
from attn_cuda._fi_key import PlanKey, plan_key
from attn_cuda._fi_wrappers import Planner, Wrappers, uses_tensor_cores, workspace_bytes
from attn_shared.inventory import Inventory
from attn_shared.workspace import Workspace

CPU = torch.device("cpu")


def key_of(num_heads: int, num_kv_heads: int, **cache: Any) -> PlanKey:
    return plan_key(fi_layer(num_heads=num_heads, num_kv_heads=num_kv_heads, cache=cache))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "expected"),
    [(2, 2, False), (4, 2, False), (6, 2, False), (8, 2, True), (10, 2, True), (16, 2, True)],
)
def test_decode_runs_on_tensor_cores_from_four_heads_in_a_group(
    num_heads: int, num_kv_heads: int, expected: bool
) -> None:
    assert uses_tensor_cores(key_of(num_heads, num_kv_heads)) is expected
    fp8 = key_of(num_heads, num_kv_heads, dtype=torch.float8_e4m3fn, kv_cache_dtype="fp8")
    assert uses_tensor_cores(fp8)


def test_equal_layers_have_one_key() -> None:
    assert plan_key(fi_layer()) is plan_key(fi_layer())
    assert plan_key(fi_layer(scale=-0.25)) is plan_key(fi_layer())  # the sign goes to the query
    assert plan_key(fi_layer(scale=0.5)) is not plan_key(fi_layer())


def test_scratch_holds_each_split_programs_rows() -> None:
    """32 / 8 heads of 64 on 132 units: 33 programs per kv head, of 128 rows, with 64 + 1 floats."""
    needed = 4 * 32 * 33 * 128 * 65
    found = workspace_bytes(key_of(32, 8), 132)
    assert needed <= found < needed + 2 * 2**20 + 1
    # 256 captured requests have a tile of 16 rows each, and their own.
    tiles = 256 * 4 // 16 + 255
    captured = 4 * 32 * max(33 * 128, tiles * 16) * 65
    assert captured <= workspace_bytes(key_of(32, 8), 132, 256) < captured + 2 * 2**20 + 1


def wrappers(workspace: Workspace | None = None) -> Wrappers:
    loaded = _fi_loaded.Loaded(device=H200, inventory=Inventory())
    return Wrappers(key_of(4, 2), CPU, loaded, workspace, 4)


def test_a_wrapper_is_lent_to_one_step_and_comes_back_when_the_step_is_forgotten() -> None:
    with fi_stubbed():
        pool = wrappers()
        first, second = (pool.decode(on_tensor_cores=True) for _ in range(2))
        assert first.planner is not second.planner
        kept = second.planner
        del second
        gc.collect()
        assert pool.decode(on_tensor_cores=True).planner is kept
        assert pool.decode(on_tensor_cores=False).planner is not kept
        assert pool.prefill("fa2").planner is not pool.prefill("fa3").planner


def test_a_captured_size_has_one_wrapper_and_all_sizes_share_page_numbers() -> None:
    with fi_stubbed() as (recorder, _):
        pool = wrappers()
        small, again, large = (pool.captured(size, 8) for size in (2, 2, 4))
        assert small.planner is again.planner is not large.planner
        assert pool.held_pages == 4 * 8
        buffers = [
            call.arguments["paged_kv_indices_buffer"]
            for call in recorder.of("BatchDecodeWithPagedKVCacheWrapper")
        ]
    assert len(buffers) == 2
    assert buffers[0] is buffers[1]


def test_all_wrappers_share_the_workspace() -> None:
    workspace = Workspace(CPU)
    with fi_stubbed() as (recorder, _):
        pool = wrappers(workspace)
        leases = [
            pool.decode(on_tensor_cores=True),
            pool.prefill("fa2"),
            pool.ragged("fa3"),
            pool.cascade(),
        ]
        used = [call.arguments["float_workspace_buffer"] for call in recorder.calls]
    assert len(leases) == len(used) == 4
    assert {tensor.data_ptr() for tensor in used} == {workspace.get(1).data_ptr()}


class Copying:
    """An event and a wrapper that note the order of what happens to them."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def plan(self, **arguments: Any) -> None:
        self.seen.append(f"plan {arguments['step']}")

    def synchronize(self) -> None:
        self.seen.append("wait")

    def record(self, stream: str) -> None:
        self.seen.append(f"record on {stream}")


def test_the_pinned_buffer_is_waited_for_before_it_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copying = Copying()
    monkeypatch.setattr(torch.cuda, "Event", lambda: copying)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    planner = Planner(copying, torch.device("cuda:1"), {})
    for step in (1, 2):
        planner.plan(step=step)
    record = "record on the stream of 1"
    assert copying.seen == ["plan 1", record, "wait", "plan 2", record]


@pytest.mark.parametrize(("release", "options"), [("0.6.13", {}), ("0.7.4", {"lse_base": "log2"})])
def test_the_base_of_the_lse_is_said_where_a_release_lets_it_be_said(
    release: str, options: dict[str, str]
) -> None:
    with fi_stubbed(release):
        loaded = _fi_loaded.loaded("FLASHINFER")
        pool = Wrappers(key_of(4, 2), CPU, loaded)
        planner = pool.prefill("fa2").planner
        assert planner.run_options == ({**options, "lse_layout": "NH"} if options else {})
        assert pool.decode(on_tensor_cores=True).planner.run_options == {}


def test_what_is_made_in_inference_mode_may_be_planned_outside_of_it() -> None:
    with fi_stubbed() as (recorder, _):
        with torch.inference_mode():
            lease = wrappers().captured(2, 8)
        (made,) = recorder.of("BatchDecodeWithPagedKVCacheWrapper")
        buffers = [value for name, value in made.arguments.items() if name.endswith("_buffer")]
        assert len(buffers) == 4
        assert not any(buffer.is_inference() for buffer in buffers)
        assert lease.planner.run_options == {}
