from __future__ import annotations

import pytest
import torch
from attn_bench_testing import CPU, workload

from attn_bench.graphs import capture, check_graphs, level_needed
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


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"device cpu has no graphs.*--graph"):
        check_graphs(CPU)
    check_graphs(torch.device("cuda"))


@pytest.mark.cuda
def test_a_replay_computes_anew() -> None:
    x = torch.zeros(4, device="cuda")
    first, second = capture([lambda: x + 1, lambda: x * 2 + 5])
    x.fill_(3.0)
    first.call()
    second.call()
    torch.cuda.synchronize()
    assert first.result.tolist() == [4.0] * 4
    assert second.result.tolist() == [11.0] * 4
