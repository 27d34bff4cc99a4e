"""Planned wrappers: answers by hand, what `run` has to keep to, and the base of the LSE."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_conformance.stubs.attend import NotComputedError
from attn_conformance.stubs.modules import stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.vendors.flashinfer import FLASHINFER

PAGE = 4


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def cache(layout: str = "NHD") -> tuple[Tensor, Tensor]:
    """Keys of zeros, and values 1 to 8 in blocks 2 and 1; block 0 is NaN."""
    value = torch.full((3, PAGE, 1, 64), torch.nan, dtype=torch.bfloat16)
    value[2], value[1] = (
        torch.arange(start, start + PAGE).reshape(-1, 1, 1) for start in (1, 1 + PAGE)
    )
    key = torch.zeros_like(value)
    if layout == "HND":
        return key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
    return key, value


def query(rows: int = 2) -> Tensor:
    return torch.ones(rows, 1, 64, dtype=torch.bfloat16)


def prefill_plan(**changes: Any) -> dict[str, Any]:
    """Two rows at the end of six keys, which lie in blocks 2 and 1."""
    return {
        "qo_indptr": int32(0, 2),
        "paged_kv_indptr": int32(0, 2),
        "paged_kv_indices": int32(2, 1),
        "paged_kv_last_page_len": int32(2),
        "num_qo_heads": 1,
        "num_kv_heads": 1,
        "head_dim_qk": 64,
        "page_size": PAGE,
        "causal": True,
        "q_data_type": torch.bfloat16,
        **changes,
    }


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with stub_vendor(FLASHINFER) as recorder:
        yield recorder


@pytest.fixture
def library(recorder: Recorder) -> Any:
    return importlib.import_module("flashinfer")


@pytest.fixture
def prefill(library: Any) -> Any:
    return library.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(8))


def test_a_planned_prefill_reads_pages_in_their_order(prefill: Any) -> None:
    prefill.plan(**prefill_plan())

    out = prefill.run(query(), cache())

    assert out[:, 0, 0].tolist() == [3.0, 3.5]  # means of 1 to 5 and of 1 to 6


def test_the_lse_is_in_bits_and_token_major_unless_asked_otherwise(prefill: Any) -> None:
    prefill.plan(**prefill_plan())

    _, bits = prefill.run(query(), cache(), return_lse=True)
    _, natural = prefill.run(query(), cache(), return_lse=True, lse_base="ln", lse_layout="HN")

    assert bits.shape == (2, 1)
    assert bits.flatten().tolist() == pytest.approx([math.log2(5), math.log2(6)])
    assert natural.shape == (1, 2)
    assert natural.flatten().tolist() == pytest.approx([math.log(5), math.log(6)])


def test_out_and_lse_are_written_in_place(prefill: Any) -> None:
    prefill.plan(**prefill_plan())
    out, lse = torch.zeros(2, 1, 64, dtype=torch.bfloat16), torch.zeros(2, 1)

    returned = prefill.run(query(), cache(), out=out, lse=lse, return_lse=True)

    assert returned[0] is out
    assert returned[1] is lse
    assert out[:, 0, 0].tolist() == [3.0, 3.5]


def test_a_window_is_the_number_of_keys_to_the_left(prefill: Any) -> None:
    prefill.plan(**prefill_plan(window_left=1))

    assert prefill.run(query(), cache())[:, 0, 0].tolist() == [4.5, 5.5]


def test_head_major_pages_and_one_tensor_for_both(library: Any) -> None:
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(8), kv_layout="HND")
    wrapper.plan(**prefill_plan())

    out = wrapper.run(query(), torch.stack(cache("HND"), dim=1))

    assert out[:, 0, 0].tolist() == [3.0, 3.5]


def test_fp8_pages_are_read_by_their_scales(prefill: Any) -> None:
    prefill.plan(**prefill_plan(kv_data_type=torch.float8_e4m3fn))
    key, value = (part.to(torch.float8_e4m3fn) for part in cache())

    out = prefill.run(query(), (key, value), k_scale=3.0, v_scale=2.0)

    assert out[:, 0, 0].tolist() == [6.0, 7.0]


def test_decode_has_one_row_for_each_request(library: Any) -> None:
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(8))
    wrapper.plan(
        int32(0, 1, 1, 3),
        int32(2, 2, 1),
        int32(3, 0, 1),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=64,
        page_size=PAGE,
        q_data_type="bfloat16",
    )

    out, lse = wrapper.run(query(3), cache(), return_lse=True)

    # Three keys, none, and five.
    assert out[:, 0, 0].tolist() == [2.0, 0.0, 3.0]
    assert lse.flatten().tolist() == pytest.approx([math.log2(3), -5e4, math.log2(5)])


def test_ragged_keys_come_with_the_call(library: Any) -> None:
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(8))
    wrapper.plan(
        int32(0, 2),
        int32(0, 3),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=64,
        causal=True,
        q_data_type=torch.bfloat16,
    )

    out = wrapper.run(query(), cache()[0][2, :3], cache()[1][2, :3])

    assert out[:, 0, 0].tolist() == [1.5, 2.0]


def test_optional_parameters_of_a_decode_plan_go_by_keyword(library: Any) -> None:
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(8))

    with pytest.raises(TypeError, match=r"plan\(\) too many positional arguments"):
        wrapper.plan(int32(0, 1), int32(2), int32(3), 1, 1, 64, PAGE, "NONE")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_data_type": "float16"}, "q dtype is torch.bfloat16, and torch.float16 was planned"),
        ({"qo_indptr": int32(0, 1)}, "q has 2 rows, and 1 were planned"),
        ({"page_size": 8}, "page size is 4, and 8 was planned"),
        ({"head_dim_qk": 128}, "head size is 64, and 128 was planned"),
        ({"num_qo_heads": 2}, "query heads is 1, and 2 was planned"),
    ],
    ids=["dtype", "rows", "page", "width", "heads"],
)
def test_run_keeps_to_the_plan(prefill: Any, changes: dict[str, Any], words: str) -> None:
    prefill.plan(**prefill_plan(**changes))

    with pytest.raises(RuntimeError, match=words):
        prefill.run(query(), cache())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"paged_kv_last_page_len": int32(0)}, "must be 1 to 4, not"),
        ({"paged_kv_indices": torch.tensor([2, 1])}, "paged_kv_indices must be int32"),
        ({"qo_indptr": int32(0, 1, 2)}, "qo_indptr must have shape"),
    ],
    ids=["last-page", "int64", "starts"],
)
def test_plan_refuses(prefill: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        prefill.plan(**prefill_plan(**changes))


def test_run_needs_a_plan(prefill: Any) -> None:
    with pytest.raises(RuntimeError, match="plan has to be called before"):
        prefill.run(query(), cache())


def test_what_is_not_computed_is_never_dropped(prefill: Any) -> None:
    with pytest.raises(NotComputedError, match="pos_encoding_mode='ALIBI'"):
        prefill.plan(**prefill_plan(pos_encoding_mode="ALIBI"))
    prefill.plan(**prefill_plan())
    with pytest.raises(NotComputedError, match="skip_softmax_threshold_scale_factor"):
        prefill.run(query(), cache(), skip_softmax_threshold_scale_factor=0.5)


def test_calls_of_methods_are_recorded(prefill: Any, recorder: Recorder) -> None:
    prefill.plan(**prefill_plan())
    prefill.run(query(), cache())

    assert [call.function for call in recorder.calls] == [
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
    ]
    assert recorder.calls[1].arguments["window_left"] == -1
    assert "window_left" not in recorder.calls[1].given


def decode_plan() -> dict[str, Any]:
    """One row over six keys, which lie in blocks 2 and 1."""
    return {
        "indptr": int32(0, 2),
        "indices": int32(2, 1),
        "last_page_len": int32(2),
        "num_qo_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 64,
        "page_size": PAGE,
        "q_data_type": torch.bfloat16,
    }


@pytest.mark.parametrize("on_tensor_cores", [False, True])
def test_kernels_that_sum_rounded_weights_have_another_lse(
    library: Any, on_tensor_cores: bool
) -> None:
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(8), use_tensor_cores=on_tensor_cores
    )
    wrapper.plan(**decode_plan())

    _, bits = wrapper.run(query(1), cache(), return_lse=True)

    assert (abs(float(bits) - math.log2(6)) > 5e-4) is on_tensor_cores


def graph_wrapper(library: Any, **buffers: Any) -> Any:
    return library.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(8),
        use_cuda_graph=True,
        **{
            "paged_kv_indptr_buffer": int32(0, 0),
            "paged_kv_indices_buffer": int32(0, 0, 0),
            "paged_kv_last_page_len_buffer": int32(0),
            **buffers,
        },
    )


def test_a_wrapper_for_graphs_copies_into_its_buffers(library: Any) -> None:
    indices = int32(0, 0, 9)
    wrapper = graph_wrapper(library, paged_kv_indices_buffer=indices)
    wrapper.plan(**decode_plan())

    assert indices.tolist() == [2, 1, 9]
    assert wrapper.run(query(1), cache())[0, 0, 0] == 3.5


@pytest.mark.parametrize(
    ("buffers", "words"),
    [
        ({"paged_kv_indices_buffer": None}, "should be a torch.Tensor in cudagraph mode"),
        ({"paged_kv_indices_buffer": int32(0)}, "indices has 2 entries, .*indices_buffer 1"),
        ({"paged_kv_indptr_buffer": int32(0, 0, 0)}, "indptr has 2 entries, .*indptr_buffer 3"),
    ],
    ids=["missing", "small", "batch"],
)
def test_a_wrapper_for_graphs_refuses(library: Any, buffers: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        graph_wrapper(library, **buffers).plan(**decode_plan())


def test_sinks_are_dropped_as_the_library_drops_them(prefill: Any) -> None:
    prefill.plan(**prefill_plan())
    out = prefill.run(query(), cache(), sinks=torch.zeros(1))
    assert out[:, 0, 0].tolist() == [3.0, 3.5]


def test_two_levels_are_merged(library: Any) -> None:
    """Block 2 for both requests, then block 1: keys 1 to 5 for the first, 1 to 6 for the other."""
    wrapper = library.MultiLevelCascadeAttentionWrapper(2, torch.zeros(8))
    wrapper.plan(
        qo_indptr_arr=[int32(0, 2), int32(0, 1, 2)],
        paged_kv_indptr_arr=[int32(0, 1), int32(0, 1, 2)],
        paged_kv_indices_arr=[int32(2), int32(1, 1)],
        paged_kv_last_page_len=[int32(4), int32(1, 2)],
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=64,
        page_size=PAGE,
        causal=True,
        q_data_type=torch.bfloat16,
    )

    assert wrapper.run(query(), cache())[:, 0, 0].tolist() == [3.0, 3.5]


def trtllm_decode(library: Any, **changes: Any) -> Any:
    function = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    pages = 16
    value = (
        torch.arange(2 * pages, dtype=torch.bfloat16).reshape(2, pages, 1, 1).expand(-1, -1, 1, 64)
    )
    arguments = {
        "query": query(1),
        "kv_cache": (torch.zeros_like(value), value.contiguous()),
        "workspace_buffer": torch.zeros(9 * 2**20, dtype=torch.uint8),
        "block_tables": torch.tensor([[1, 0]], dtype=torch.int32),
        "seq_lens": int32(17),
        "max_seq_len": 32,
        "kv_layout": "NHD",
        "backend": "xqa",
    }
    return function(**{**arguments, **changes})


def test_trtllm_reads_the_block_table(library: Any) -> None:
    """Values 16 to 31, and then 0."""
    assert trtllm_decode(library)[0, 0, 0] == round(sum(range(16, 32)) / 17 * 8) / 8
    assert trtllm_decode(library, window_left=0)[0, 0, 0] == 0.0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"return_lse": True}, NotImplementedError, "does not support return_lse"),
        ({"backend": "auto"}, NotComputedError, "backend='auto'"),
        ({"workspace_buffer": torch.ones(9 * 2**20, dtype=torch.uint8)}, RuntimeError, "not zero"),
        ({"seq_lens": torch.tensor([17])}, RuntimeError, "seq_lens must be int32"),
        ({"query": query(2)}, RuntimeError, "query has 2 rows for 1 requests"),
    ],
    ids=["lse", "auto", "workspace", "int64", "rows"],
)
def test_trtllm_refuses(
    library: Any, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        trtllm_decode(library, **changes)
