"""`Attention` over four gloo processes, which are started once: see layer_cases."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import layer_mla
import layer_ranks as ranks
import pytest
import torch
from layer_cases import cases

CASES = [*cases(), *layer_mla.CASES, *layer_mla.GATHERED]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found wrong with its answer to each case."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = [
        subprocess.Popen(
            [sys.executable, ranks.__file__, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks.WORLD_SIZE)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    # The last rank leaves in the middle of a step, on purpose.
    codes = [process.returncode for process in processes]
    assert codes == [0, 0, 0, 17], "\n".join(said)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks.WORLD_SIZE)]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_unsharded_answer(results: list[dict[str, Any]], case: str) -> None:
    assert [result[case] for result in results] == ["", "", "", ""]


def test_company_changes_no_bit_of_an_invariant_layer(results: list[dict[str, Any]]) -> None:
    assert [result["invariance"] for result in results] == ["", "", "", ""]


def test_a_captured_step_is_refreshed_where_it_stands(results: list[dict[str, Any]]) -> None:
    assert [result["replays"] for result in results] == ["", "", "", ""]


REFUSALS = {
    "interleave": "interleave=32 is not allowed; allowed: a divisor of block_size=16",
    "odd interleave": "interleave=3 is not allowed; allowed: a divisor of block_size=16",
    "alibi": "interleave=4 is not allowed; allowed: 1 with ALiBi",
    "chunks": "dcp_chunked_local=8 (allowed: None with dcp_size=4)",
    "window": "dcp_window=(3, 3) (allowed: no window for rows that are not causal",
    "encoder": "dcp_attn_type=encoder_only (allowed: decoder with dcp_size=4)",
    "ag_rs": "combine='ag_rs' is not allowed; allowed: 'a2a' with batch_invariant=True",
    "combine": "unknown combine 'ring'; allowed: a2a, ag_rs",
    "size": "dcp_size=2 is not allowed; allowed: 4, the size of the group",
    "no lse": "dcp_lse=False (allowed: a backend that returns its LSE, with dcp_size=4)",
    "heads": "the ranks disagree on num_heads of the layer: "
    "rank 0 has 4, rank 1 has 2, rank 2 has 2, rank 3 has 2",
    "flavours": "the ranks disagree on cache_dtype of the layer: rank 0 has torch.float8_e4m3fn, "
    "rank 1 has torch.float8_e4m3fnuz",
    "interleaves": "the ranks disagree on interleave of the layer: rank 0 has 1",
    "batch": "the ranks disagree on seq_lens of the batch: "
    "rank 0 has [5, 6], rank 1 has [5, 6], rank 2 has [5, 7], rank 3 has [5, 6]",
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_every_rank_is_refused_with_the_values(results: list[dict[str, Any]], refusal: str) -> None:
    for result in results:
        assert REFUSALS[refusal] in result["refusals"][refusal]


def test_shares_that_are_not_the_ranks_own(results: list[dict[str, Any]]) -> None:
    # Of 5 tokens rank 0 holds 2, the others one; of 6 rank 1 holds 2.
    for rank, share in enumerate((2, 1, 1, 1)):
        words = results[rank]["refusals"]["shares"]
        assert f"dcp_local_seq_lens_cpu[0] is 0; allowed: {share}, what rank {rank} holds" in words


def test_a_rank_that_dies_ends_the_others_with_an_error(results: list[dict[str, Any]]) -> None:
    assert "death" not in results[-1]
    for result in results[:-1]:
        words, seconds = result["death"]
        assert words
        assert seconds < ranks.TIMEOUT + 30
