from __future__ import annotations

import pytest
import torch
from attn_bench_testing import CPU, workload

from attn_bench.graphs import capture, check_graphs, is_captured, level_needed, rotation
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import UnsupportedOptionError


@pytest.mark.parametrize(
    ("query_lens", "level"),
    [
        ((1, 1), AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ((2, 2), AttentionCGSupport.UNIFORM_BATCH),
        ((1, 2), AttentionCGSupport.ALWAYS),
    ],
)
def test_level_that_a_batch_needs(query_lens: tuple[int, ...], level: AttentionCGSupport) -> None:
    assert level_needed(workload(query_lens, (9, 9))) is level


@pytest.mark.parametrize(("query_lens", "captured"), [((1, 16), True), ((1, 17), False)])
def test_decode_is_captured_and_prefill_is_not(query_lens: tuple[int, ...], captured: bool) -> None:
    assert is_captured(workload(query_lens, (20, 20))) is captured


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"device cpu has no graphs.*--graph"):
        check_graphs(CPU)
    check_graphs(torch.device("cuda"))


@pytest.mark.parametrize(("calls", "turns"), [(1, 24), (3, 8), (5, 5), (48, 1)])
def test_a_graph_holds_whole_turns_of_at_least_24_calls(calls: int, turns: int) -> None:
    order = rotation(calls)
    assert order == [*range(calls)] * turns
    assert len(order) >= 24


@pytest.mark.cuda
def test_a_replay_computes_anew() -> None:
    x, total = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    replay = capture([lambda: x + 1, lambda: total.add_(x)])
    total.zero_()
    x.fill_(3.0)
    replay.call()
    torch.cuda.synchronize()
    assert replay.count == 24
    assert replay.result.tolist() == [4.0] * 4
    assert total.tolist() == [3.0 * 12] * 4
