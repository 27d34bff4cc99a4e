from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attn_bench_testing import CPU, workload
from torch import Tensor

from attn_bench import agreement
from attn_bench.agreement import WrongResultError, check_agreement
from attn_bench.contenders import BackendContender, Copy
from attn_bench.peers import SdpaContender
from attn_bench.workloads import Workload, WorkloadPhase
from attn_shared.accuracy import eager_attention

MIXED = workload((1, 9, 6), (12, 30, 6), phase=WorkloadPhase.MIXED)
LONG = workload((1,), (4096,), dtype=torch.bfloat16)


def answered(batch: Workload) -> tuple[Copy, Tensor]:
    copy = SdpaContender().prepare(batch, CPU, 1, is_captured=False).copies[0]
    return replace(copy, tokens=lambda output: output), copy.tokens(copy.call())


@pytest.mark.parametrize("batch", [MIXED, LONG, MIXED.with_fields(dtype=torch.bfloat16)])
def test_attention_agrees(batch: Workload) -> None:
    check_agreement("torch.sdpa", *answered(batch))


def _scaled(output: Tensor) -> Tensor:
    return output * 1.05


def _with_nan(output: Tensor) -> Tensor:
    output[-1, 0, 0] = torch.nan
    return output


@pytest.mark.parametrize("batch", [MIXED, LONG])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [(torch.zeros_like, "over"), (_scaled, "over"), (_with_nan, "NaN or infinite")],
)
def test_what_is_no_attention_is_refused(
    batch: Workload, spoil: Callable[[Tensor], Tensor], words: str
) -> None:
    copy, output = answered(batch)
    with pytest.raises(WrongResultError, match=f"PEER is not timed: its result is wrong .*{words}"):
        check_agreement("PEER", copy, spoil(output))


def test_first_and_last_rows_of_the_longest_request_are_looked_at() -> None:
    copy, output = answered(MIXED)
    for row in (1, 9, 10, 15):  # of requests 1 (rows 1 to 9) and 2 (rows 10 to 15)
        wrong = output.clone()
        wrong[row] += 0.1
        with pytest.raises(WrongResultError):
            check_agreement("PEER", copy, wrong)


def test_a_window_that_hides_one_key_of_many_is_seen() -> None:
    batch = workload((1,), (256,))
    copy, output = answered(batch)
    keys = copy.keys(0)
    hidden = replace(copy, keys=lambda request: keys._replace(key=keys.key.roll(1, 0)))
    with pytest.raises(WrongResultError):
        check_agreement("PEER", hidden, output)


def test_another_shape_is_refused() -> None:
    copy, output = answered(MIXED)
    with pytest.raises(WrongResultError, match=r"a shape of \(15, 4, 8\), not \(16, 4, 8\)"):
        check_agreement("PEER", copy, output[1:])


def paged(batch: Workload) -> tuple[Copy, Tensor]:
    copy = BackendContender("TORCH_SDPA").prepare(batch, CPU, 1, is_captured=False).copies[0]
    return copy, copy.call()


def test_a_window_is_part_of_the_answer() -> None:
    copy, output = paged(workload((1, 4), (12, 30), window=5))
    check_agreement("PEER", copy, output)
    with pytest.raises(WrongResultError):
        check_agreement("PEER", replace(copy, window=(5, 0)), output)


def test_the_lse_is_held_to_the_reference() -> None:
    copy, output = paged(workload((1, 4), (12, 30), returns_lse=True))
    check_agreement("PEER", copy, output)
    assert copy.lse is not None
    lse = copy.lse(output)
    with pytest.raises(WrongResultError, match="LSE at"):
        check_agreement("PEER", replace(copy, lse=lambda output: lse / 0.6931), output)
    with pytest.raises(WrongResultError, match=r"LSE of \(5, 4\), not \(Hq, T\)"):
        check_agreement("PEER", replace(copy, lse=lambda output: lse.T), output)


def test_long_contexts_are_attended_to_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MANY_ELEMENTS", 0)
    check_agreement("torch.sdpa", *answered(MIXED))


def test_products_in_fp8_have_the_budget_of_fp8() -> None:
    batch = workload((1,), (64,), dtype=torch.bfloat16, kv_cache_dtype="fp8")
    copy, _ = paged(batch)
    rounded = replace(copy, query=lambda: copy.query().to(torch.float8_e4m3fn).to(torch.bfloat16))
    answer = agreement._Sample.of(rounded, rounded.query(), 0, 64)
    output = eager_attention(**answer._call(), compute_dtype=torch.float8_e4m3fn).output
    check_agreement("PEER", replace(copy, compute_dtype=torch.float8_e4m3fn), output)
    with pytest.raises(WrongResultError):
        check_agreement("PEER", copy, output)


def test_a_coarser_call_is_held_to_its_own_factor() -> None:
    copy, output = answered(LONG)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    coarse = output + 2e-2 * noise * output.float().abs()
    with pytest.raises(WrongResultError):
        check_agreement("PEER", copy, coarse)
    check_agreement("PEER", replace(copy, error_factor=4.0), coarse)
    with pytest.raises(WrongResultError, match="relative error"):
        check_agreement("PEER", replace(copy, error_factor=4.0), torch.zeros_like(output))
