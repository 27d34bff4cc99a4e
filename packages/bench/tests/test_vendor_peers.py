"""Each vendor's peer against a stub that computes from exactly what it was handed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_bench_testing import CPU, workload

from attn_bench.agreement import check_agreement
from attn_bench.contenders import Prepared
from attn_bench.peers import contender_named, known_peers
from attn_bench.vendor_peers import VENDOR_PEERS, VendorContender, VendorPeer
from attn_bench.workloads import Heads, Workload, WorkloadPhase
from attn_conformance.stubs.checks import Limits
from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3
from attn_conformance.stubs.vendors.flash_attn_4 import FLASH_ATTN_4
from attn_conformance.stubs.vendors.flashinfer import FLASHINFER
from attn_conformance.stubs.vendors.vllm_flash_attn import SCHEDULER_METADATA
from attn_shared.errors import UnsupportedOptionError, VendorMissingError

# vLLM 0.25.1's, read from its wheel: one call for all versions.
_VLLM_CALL = VarlenFunction(
    signature=VendorSignature(
        name="flash_attn_varlen_func",
        parameters=(
            "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, "
            "seqused_k=None, q_v=None, dropout_p=0.0, softmax_scale=None, causal=False, "
            "window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False, "
            "return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, "
            "scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, "
            "num_splits=0, output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, "
            "cp_rank=0, cp_tot_seqused_k=None, mask_mod=None, aux_tensors=None, "
            "dynamic_causal=None"
        ),
        returns="out; with return_softmax_lse out and LSE (Hq, T)",
    ),
    roles=Roles(
        out="out",
        key_starts="cu_seqlens_k",
        key_lens="seqused_k",
        table="block_table",
        max_key_len="max_seqlen_k",
        alibi="alibi_slopes",
        sinks="s_aux",
        query_descale="q_descale",
        key_descale="k_descale",
        value_descale="v_descale",
        lse_flag="return_softmax_lse",
    ),
    limits=Limits(dtypes=(torch.float16, torch.bfloat16, torch.float8_e4m3fn)),
    tuning=frozenset({"scheduler_metadata", "num_splits", "fa_version"}),
)
VLLM = VendorStub(
    distribution="vllm",
    version="0.25.1",
    modules={
        "vllm.vllm_flash_attn": {
            "flash_attn_varlen_func": _VLLM_CALL,
            "get_scheduler_metadata": SCHEDULER_METADATA,
            "fa_version_unsupported_reason": lambda version: None,
        }
    },
)
STUBS = {
    "flash_attn_3": FLASH_ATTN_3,
    "flash_attn_3_vllm": VLLM,
    "flash_attn_2_vllm": VLLM,
    "flash_attn_4": FLASH_ATTN_4,
    "flashinfer": FLASHINFER,
}
HEADS = Heads(num_heads=4, num_kv_heads=2, head_size=64)  # FlashInfer takes multiples of 64
FP8_PEERS = ("flash_attn_3", "flash_attn_3_vllm", "flashinfer")


def batch(
    query_lens: tuple[int, ...] = (1, 1), seq_lens: tuple[int, ...] = (21, 40), **fields: Any
) -> Workload:
    plain = {"heads": HEADS, "dtype": torch.bfloat16, "block_size": 16}
    return workload(query_lens, seq_lens, **(plain | fields))


BATCHES = [
    batch(),
    batch((1, 1, 1), (16, 1, 33), block_size=32),
    batch((4, 4), (21, 40)),
    batch((40,), (40,), phase=WorkloadPhase.PREFILL),
    batch((1, 5, 20), (33, 25, 20), phase=WorkloadPhase.MIXED),
    batch(window=7),
    batch((20, 3), (30, 40), window=7, phase=WorkloadPhase.CHUNKED),
    batch(returns_lse=True),
    batch((3, 9), (21, 40), returns_lse=True, phase=WorkloadPhase.CHUNKED),
    batch(own_output=True),
]


def prepared(name: str, asked: Workload, num_copies: int = 2) -> Prepared:
    return contender_named(name).prepare(asked, CPU, num_copies, is_captured=False)


@pytest.mark.parametrize("name", STUBS)
@pytest.mark.parametrize("asked", BATCHES, ids=lambda asked: asked.name)
def test_a_direct_call_answers_as_the_reference_on_each_copy(name: str, asked: Workload) -> None:
    with stub_vendor(STUBS[name]):
        found = prepared(name, asked)
        for copy in found.copies:
            check_agreement(name, copy, copy.call())
    assert found.block_size == asked.block_size
    assert dict(found.libraries) == {STUBS[name].distribution: STUBS[name].version}
    assert (found.copies[0].lse is None) is not asked.returns_lse


@pytest.mark.parametrize("name", FP8_PEERS)
def test_an_fp8_cache(name: str) -> None:
    with stub_vendor(STUBS[name]):
        found = prepared(name, batch(kv_cache_dtype="fp8"))
        copy = found.copies[0]
        check_agreement(name, copy, copy.call())
    takes_fp8_queries = name != "flashinfer"
    assert (copy.compute_dtype is torch.float8_e4m3fn) is takes_fp8_queries
    assert any("query is in fp8" in note for note in found.notes) is takes_fp8_queries


@pytest.mark.parametrize("name", set(STUBS) - set(FP8_PEERS))
def test_what_reads_no_fp8_cache_says_so(name: str) -> None:
    refused = pytest.raises(UnsupportedOptionError, match=f"{name} reads no cache of .*fp8.*auto")
    with stub_vendor(STUBS[name]), refused:
        prepared(name, batch(kv_cache_dtype="fp8"))


@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn_3_vllm", "flashinfer"])
def test_the_plan_is_the_librarys_own_and_outside_the_call(name: str) -> None:
    with stub_vendor(STUBS[name]) as recorder:
        found = prepared(name, batch())
        assert found.plan is not None
        before = len(recorder.calls)
        found.copies[0].call()
        assert len(recorder.calls) == before + 1
        found.plan()
        assert _last(recorder).function in ("get_scheduler_metadata", DECODE_PLAN)


DECODE_PLAN = "BatchDecodeWithPagedKVCacheWrapper.plan"


def _last(recorder: Recorder) -> Any:
    return recorder.calls[-1]


@pytest.mark.parametrize("query_len", [1, 4])
def test_flashinfer_plans_again_on_another_wrapper(query_len: int) -> None:
    """What a captured run reads stays as it is."""
    with stub_vendor(FLASHINFER):
        found = prepared("flashinfer", batch((query_len,) * 2, (21, 40)), 1)
        copy = found.copies[0]
        runs = copy.call.func.__self__  # type: ignore[attr-defined]
        assert found.plan is not None
        assert found.plan.func.__self__ is not runs  # type: ignore[attr-defined]
        found.plan()
        check_agreement("flashinfer", copy, copy.call())


def test_flashinfer_decodes_on_tensor_cores_and_in_the_dtype_of_the_batch() -> None:
    with stub_vendor(FLASHINFER) as recorder:
        prepared("flashinfer", batch())
    made, plan, _ = recorder.calls
    assert made.arguments["use_tensor_cores"] is True
    assert plan.arguments["q_data_type"] is torch.bfloat16
    assert plan.arguments["indptr"].tolist() == [0, 2, 5]
    assert plan.arguments["last_page_len"].tolist() == [5, 8]
    assert plan.arguments["indptr"].device.type == "cpu"


def test_flashinfers_wrapper_for_graphs_is_planned_into_buffers_and_decodes_alone() -> None:
    with stub_vendor(FLASHINFER) as recorder:
        found = prepared("flashinfer_graph", batch((1, 1), (21, 40)), 1)
        copy = found.copies[0]
        check_agreement("flashinfer_graph", copy, copy.call())
        made = recorder.of("BatchDecodeWithPagedKVCacheWrapper")
        with pytest.raises(UnsupportedOptionError, match="query_len=4; allowed: 1"):
            prepared("flashinfer_graph", batch((4,), (40,)))
    assert all(call.arguments["use_cuda_graph"] for call in made)
    buffers = [call.arguments["paged_kv_indptr_buffer"] for call in made]
    assert buffers[0].tolist() == [0, 2, 5]
    assert buffers[0] is not buffers[1]


def test_flashinfer_takes_other_kernels_for_an_lse_or_says_that_there_are_none() -> None:
    with stub_vendor(FLASHINFER) as recorder:
        prepared("flashinfer", batch(returns_lse=True))
        prepared("flashinfer", batch((4,), (40,), returns_lse=True))
        made = {
            call.function: call.arguments for call in recorder.calls if "." not in call.function
        }
        heads = Heads(num_heads=10, num_kv_heads=2, head_size=64)
        for changes in ({"heads": heads}, {"kv_cache_dtype": "fp8"}):
            with pytest.raises(UnsupportedOptionError, match="flashinfer has no LSE of"):
                prepared("flashinfer", batch(returns_lse=True, **changes))
    assert made["BatchDecodeWithPagedKVCacheWrapper"]["use_tensor_cores"] is False
    assert made["BatchPrefillWithPagedKVCacheWrapper"]["backend"] == "auto"


def test_flashinfer_is_not_tried_with_a_head_size_that_it_does_not_serve() -> None:
    asked = batch(heads=Heads(num_heads=4, num_kv_heads=2, head_size=96))
    words = "flashinfer does not serve head_size=96; allowed: 64, 128, 256"
    with stub_vendor(FLASHINFER) as recorder, pytest.raises(UnsupportedOptionError, match=words):
        prepared("flashinfer", asked)
    assert recorder.calls == []


@pytest.mark.parametrize(("query_len", "backend"), [(4, "fa2"), (16, "fa2"), (17, "auto")])
def test_flashinfer_takes_its_decode_kernels_for_few_queries(query_len: int, backend: str) -> None:
    with stub_vendor(FLASHINFER) as recorder:
        prepared("flashinfer", batch((query_len,), (40,)))
    assert recorder.calls[0].arguments["backend"] == backend


def test_a_given_output_is_written_where_the_call_takes_one() -> None:
    for name in ("flash_attn_3_vllm", "flashinfer"):
        with stub_vendor(STUBS[name]) as recorder:
            prepared(name, batch()).copies[0].call()
            assert _last(recorder).arguments["out"] is not None
            prepared(name, batch(own_output=True)).copies[0].call()
            assert _last(recorder).arguments["out"] is None


def test_schedule_and_call_see_the_same_bounds() -> None:
    with stub_vendor(FLASH_ATTN_3) as recorder:
        prepared("flash_attn_3", batch(window=7), 1).copies[0].call()
    schedule, call = recorder.calls
    table = call.arguments["page_table"]
    assert schedule.arguments["max_seqlen_k"] == table.shape[1] * 16 == 48
    for name in ("window_size", "causal", "num_splits"):
        assert schedule.arguments[name] == call.arguments[name]
    assert call.arguments["scheduler_metadata"] is not None


def test_a_version_that_the_build_does_not_run_is_explained() -> None:
    (module,) = VLLM.modules.values()
    reasons = {"fa_version_unsupported_reason": lambda version: "needs compute capability 9.x"}
    stub = replace(VLLM, modules={"vllm.vllm_flash_attn": {**module, **reasons}})
    words = "flash_attn_3_vllm does not run here: needs compute capability 9.x"
    with stub_vendor(stub), pytest.raises(UnsupportedOptionError, match=words):
        prepared("flash_attn_3_vllm", batch())


@pytest.fixture(params=VENDOR_PEERS, ids=lambda peer: peer.name)
def absent(request: pytest.FixtureRequest) -> VendorPeer:
    peer: VendorPeer = request.param
    return replace(peer, distributions=("attn-no-such-library",))


def test_an_absent_library_comes_with_its_command(absent: VendorPeer) -> None:
    with pytest.raises(VendorMissingError, match="attn-no-such-library") as caught:
        VendorContender(absent)
    assert caught.value.exit_code == 4
    assert caught.value.hint == f"run: {absent.install}"
    assert absent.needs() == f"not installed; {absent.install}"


def test_every_peer_is_listed_with_what_it_needs() -> None:
    with stub_vendor(FLASHINFER):
        listed = {name: needs for name, _, needs in known_peers()}
    assert set(STUBS) < set(listed)
    assert listed["flashinfer"] == "flashinfer-python 0.7.4"
    assert listed["torch.sdpa"] == "torch"
