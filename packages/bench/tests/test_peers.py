from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attn_bench_testing import CPU, workload
from torch import Tensor

from attn_bench.agreement import check_agreement
from attn_bench.contenders import BackendContender
from attn_bench.peers import (
    FunctionContender,
    GatheredSdpaContender,
    PeerInputs,
    SdpaContender,
    contender_named,
)
from attn_bench.workloads import Workload, WorkloadPhase
from attn_shared.errors import InvalidInputError, UnknownNameError, UnsupportedOptionError
from attn_shared.reference import AttentionOptions, paged_attention

BATCHES = [
    workload((1, 1, 1), (9, 9, 9)),
    workload((1, 1), (5, 9)),
    workload((7,), (7,), phase=WorkloadPhase.PREFILL),
    workload((3, 3), (9, 9), phase=WorkloadPhase.CHUNKED),
    workload((1, 3, 7), (9, 8, 7), phase=WorkloadPhase.MIXED, dtype=torch.bfloat16),
]


def reference_peer(inputs: PeerInputs) -> Callable[[], Tensor]:
    """A function of one's own: the reference."""

    def call() -> Tensor:
        result = paged_attention(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            AttentionOptions(scale=inputs.scale),
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=inputs.block_table,
        )
        return inputs.output.copy_(result.output)

    return call


NOT_A_FUNCTION = 3


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
@pytest.mark.parametrize("name", ["torch.sdpa", "torch.sdpa_gathered", "test_peers:reference_peer"])
def test_peers_compute_attention(
    batch: Workload, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    prepared = contender_named(name).prepare(batch, CPU, 2, is_captured=False)
    assert prepared.name == name
    for copy in prepared.copies:
        check_agreement(name, copy, copy.call())


def test_names() -> None:
    assert isinstance(contender_named("torch.sdpa"), SdpaContender)
    assert isinstance(contender_named("torch.sdpa_gathered"), GatheredSdpaContender)
    assert isinstance(contender_named("TORCH_SDPA"), BackendContender)
    with pytest.raises(UnknownNameError, match=r"unknown peer 'torch.spda'.*did you mean"):
        contender_named("torch.spda")


@pytest.mark.parametrize("name", ["no_such_module_here:peer", "test_peers:no_such_peer"])
def test_a_function_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(UnknownNameError, match=f"{name}.*cannot be imported.*PYTHONPATH"):
        FunctionContender(name)


def test_something_that_is_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(InvalidInputError, match="the name of a function"):
        FunctionContender("test_peers:NOT_A_FUNCTION")


@pytest.mark.parametrize("name", ["torch.sdpa", "torch.sdpa_gathered"])
def test_torch_reads_no_quantised_cache(name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"{name} reads no cache of .*fp8"):
        contender_named(name).prepare(workload(kv_cache_dtype="fp8"), CPU, 1, is_captured=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seq_lens", [(9, 9, 9), (5, 9)])
def test_decodes_folded_into_rows(seq_lens: tuple[int, ...], dtype: torch.dtype) -> None:
    batch = workload((1,) * len(seq_lens), seq_lens, dtype=dtype)
    (copy,) = contender_named("torch.sdpa_folded").prepare(batch, CPU, 1, is_captured=False).copies
    check_agreement("torch.sdpa_folded", copy, copy.call())


def test_more_than_a_decode_is_not_folded() -> None:
    with pytest.raises(UnsupportedOptionError, match="folds no query_len=3; allowed: 1"):
        contender_named("torch.sdpa_folded").prepare(
            workload((3,), (9,)), CPU, 1, is_captured=False
        )


def test_reading_alone_moves_the_bytes_of_the_call() -> None:
    prepared = contender_named("torch.read").prepare(workload(), CPU, 2, is_captured=False)
    assert not prepared.is_attention
    # 14 keys and values of 2 heads of 8 floats, 2 rows of 4 heads read and written.
    num_bytes = 2 * 14 * 2 * 8 * 4 + 2 * 2 * 4 * 8 * 4
    for copy in prepared.copies:
        assert copy.query().numel() * 4 == num_bytes
        assert float(copy.call()) == pytest.approx(float(copy.query().sum()))
