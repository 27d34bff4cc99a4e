"""Calls of the FlashAttention kind: answers by hand, and refusals as the vendors word them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_conformance.stubs.attend import NotComputedError
from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.vendors.aiter import AITER_0_1_7, AITER_HEAD
from attn_conformance.stubs.vendors.flash_attn_2 import FLASH_ATTN_2
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3
from attn_conformance.stubs.vendors.flash_attn_4 import FLASH_ATTN_4
from attn_conformance.stubs.vendors.vllm_xpu_kernels import VLLM_XPU_KERNELS

Call = Callable[..., Any]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def tensors(page: int, num_rows: int = 2) -> dict[str, Tensor]:
    """Keys of zeros, and values 1, 2, 3, ... in block 1 of two; block 0 is NaN."""
    value = torch.full((2, page, 1, 16), torch.nan, dtype=torch.bfloat16)
    value[1] = torch.arange(1, page + 1).reshape(-1, 1, 1)
    key = torch.zeros_like(value)
    key[0] = torch.nan
    return {"q": torch.ones(num_rows, 1, 16, dtype=torch.bfloat16), "k": key, "v": value}


# What each call is given for two rows at the end of three keys in block 1.
PAGED: dict[str, tuple[VendorStub, str, str, int, dict[str, Any]]] = {
    "flash_attn_2": (
        FLASH_ATTN_2,
        "flash_attn",
        "flash_attn_varlen_func",
        256,
        {
            "cu_seqlens_q": int32(0, 2),
            "cu_seqlens_k": int32(0, 3),
            "max_seqlen_q": 2,
            "max_seqlen_k": 3,
            "block_table": int32(1).reshape(1, 1),
            "return_attn_probs": True,
        },
    ),
    "flash_attn_4": (
        FLASH_ATTN_4,
        "flash_attn.cute",
        "flash_attn_varlen_func",
        16,
        {
            "cu_seqlens_q": int32(0, 2),
            "seqused_k": int32(3),
            "max_seqlen_q": 2,
            "max_seqlen_k": 3,
            "page_table": int32(1).reshape(1, 1),
            "return_lse": True,
        },
    ),
    "aiter_0_1_7": (
        AITER_0_1_7,
        "aiter",
        "flash_attn_varlen_func",
        128,
        {
            "cu_seqlens_q": int32(0, 2),
            "cu_seqlens_k": int32(0, 3),
            "max_seqlen_q": 2,
            "max_seqlen_k": 3,
            "block_table": int32(1).reshape(1, 1),
            "return_lse": True,
        },
    ),
    "vllm_xpu_kernels": (
        VLLM_XPU_KERNELS,
        "vllm_xpu_kernels",
        "flash_attn_varlen_func",
        16,
        {
            "max_seqlen_q": 2,
            "cu_seqlens_q": int32(0, 2),
            "max_seqlen_k": 3,
            "seqused_k": int32(3),
            "block_table": int32(1).reshape(1, 1),
            "return_softmax_lse": True,
        },
    ),
}


@pytest.fixture(params=list(PAGED))
def paged(request: pytest.FixtureRequest) -> Iterator[tuple[Call, dict[str, Any]]]:
    """A paged call of each vendor, and its arguments."""
    stub, module, name, page, arguments = PAGED[request.param]
    with stub_vendor(stub):
        function = getattr(importlib.import_module(module), name)
        yield function, {**tensors(page), **arguments, "causal": True}


@pytest.fixture
def flash_attn_2() -> Iterator[tuple[Call, dict[str, Any]]]:
    stub, module, name, page, arguments = PAGED["flash_attn_2"]
    with stub_vendor(stub):
        yield (
            getattr(importlib.import_module(module), name),
            {**tensors(page), **arguments, "causal": True},
        )


@pytest.fixture
def flash_attn_3() -> Iterator[Any]:
    with stub_vendor(FLASH_ATTN_3):
        yield importlib.import_module("flash_attn_interface")


def test_rows_at_the_end_see_means_of_values(paged: tuple[Call, dict[str, Any]]) -> None:
    function, arguments = paged

    out, lse, *_ = function(**arguments)

    assert out[:, 0, 0].tolist() == [1.5, 2.0]  # of 1, 2 and of 1, 2, 3
    assert out.dtype is torch.bfloat16
    assert lse.shape == (1, 2)
    assert lse.tolist()[0] == pytest.approx([math.log(2), math.log(3)])


def test_a_window_leaves_keys_beside_the_own(paged: tuple[Call, dict[str, Any]]) -> None:
    function, arguments = paged
    arguments.pop("return_softmax_lse", None)  # which Intel's kernels have no window beside

    result = function(**arguments, window_size=[0, 0])

    out = result if isinstance(result, Tensor) else result[0]
    assert out[:, 0, 0].tolist() == [2.0, 3.0]


def test_a_bound_that_is_too_small_leaves_rows_unwritten(
    paged: tuple[Call, dict[str, Any]],
) -> None:
    function, arguments = paged

    out, *_ = function(**{**arguments, "max_seqlen_q": 1})
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    out, *_ = function(**{**arguments, "max_seqlen_k": 2})
    assert out.isnan().all()


def test_rows_of_padding_are_not_computed(paged: tuple[Call, dict[str, Any]]) -> None:
    function, arguments = paged
    query = torch.cat([arguments["q"], torch.full((3, 1, 16), torch.nan, dtype=torch.bfloat16)])

    out, *_ = function(**{**arguments, "q": query})

    assert out[:2, 0, 0].tolist() == [1.5, 2.0]
    assert out[2:].isnan().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.ones(2, 1, 16)}, "query must be float16 or bfloat16, not float32"),
        ({"q": torch.ones(2, 1, 32, dtype=torch.bfloat16)}, "key heads are 16 wide"),
        ({"k": torch.zeros(2, 256, 1, 16, dtype=torch.float16)}, "key must be bfloat16"),
        ({"cu_seqlens_q": torch.tensor([0, 2])}, "cu_seqlens_q must be int32"),
        ({"cu_seqlens_q": int32(0, 3)}, "ends at 3, past 2 rows"),
    ],
    ids=["dtype", "width", "key-dtype", "int64", "rows"],
)
def test_what_no_kernel_takes_is_a_runtime_error(
    paged: tuple[Call, dict[str, Any]], changes: dict[str, Any], words: str
) -> None:
    function, arguments = paged

    with pytest.raises(RuntimeError, match=words):
        function(**{**arguments, **changes})


def test_an_unknown_argument_is_a_type_error(paged: tuple[Call, dict[str, Any]]) -> None:
    function, arguments = paged

    with pytest.raises(TypeError, match="unexpected keyword argument 'soft_cap'"):
        function(**arguments, soft_cap=1.0)


def test_a_block_outside_of_the_cache_is_no_refusal(paged: tuple[Call, dict[str, Any]]) -> None:
    function, arguments = paged
    (table,) = {"block_table", "page_table"} & set(arguments)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        function(**{**arguments, table: int32(9).reshape(1, 1)})


def test_what_is_not_computed_is_never_dropped(paged: tuple[Call, dict[str, Any]]) -> None:
    function, arguments = paged
    name = "dropout_p" if "page_table" not in arguments else "score_mod"

    with pytest.raises(NotComputedError, match=f"{name}=0.5"):
        function(**arguments, **{name: 0.5})


def test_flash_attn_2_takes_pages_of_256(flash_attn_2: tuple[Call, dict[str, Any]]) -> None:
    function, arguments = flash_attn_2

    with pytest.raises(RuntimeError, match="a page of 16 tokens is no multiple of 256"):
        function(**{**arguments, **tensors(16)})


def test_flash_attn_2_returns_plus_infinity_without_a_key(
    flash_attn_2: tuple[Call, dict[str, Any]],
) -> None:
    function, arguments = flash_attn_2

    out, lse, _ = function(**{**arguments, "cu_seqlens_k": int32(0, 0)})

    assert out.tolist() == torch.zeros(2, 1, 16).tolist()
    assert lse.tolist() == [[math.inf, math.inf]]


def test_flash_attn_2_shifts_the_lse_of_alibi_by_position(
    flash_attn_2: tuple[Call, dict[str, Any]],
) -> None:
    function, arguments = flash_attn_2

    _, lse, _ = function(**arguments, alibi_slopes=torch.ones(1))

    # Logits of its columns are 0, 1, 2, whatever the row.
    expected = [math.log(1 + math.e), math.log(1 + math.e + math.e**2)]
    assert lse.tolist()[0] == pytest.approx(expected)


def test_flash_attn_2_decodes_a_batch_of_equal_queries() -> None:
    parts = tensors(256)
    with stub_vendor(FLASH_ATTN_2):
        function = importlib.import_module("flash_attn").flash_attn_with_kvcache
        out, lse = function(
            q=torch.ones(2, 1, 1, 16, dtype=torch.bfloat16),
            k_cache=parts["k"],
            v_cache=parts["v"],
            cache_seqlens=int32(2, 3),
            block_table=int32(1, 1).reshape(2, 1),
            causal=True,
            return_softmax_lse=True,
        )

    assert out.shape == (2, 1, 1, 16)
    assert out[:, 0, 0, 0].tolist() == [1.5, 2.0]
    assert lse.shape == (2, 1, 1)
    assert lse.flatten().tolist() == pytest.approx([math.log(2), math.log(3)])


def test_flash_attn_3_counts_a_sink_once(flash_attn_3: Any) -> None:
    parts = tensors(5)

    out, lse, *_ = flash_attn_3.flash_attn_with_kvcache(
        q=parts["q"],
        k_cache=parts["k"],
        v_cache=parts["v"],
        cache_seqlens=int32(3),
        page_table=int32(1).reshape(1, 1),
        cu_seqlens_q=int32(0, 2),
        max_seqlen_q=2,
        causal=True,
        sinks=torch.zeros(1, dtype=torch.bfloat16),
        return_softmax_lse=True,
    )

    # A sink of logit 0 weighs as much as each key: 3 / 3 and 6 / 4.
    assert out[:, 0, 0].tolist() == [1.0, 1.5]
    assert lse.tolist()[0] == pytest.approx([math.log(3), math.log(4)])


def test_flash_attn_3_reads_fp8_by_descales_and_answers_in_bfloat16(flash_attn_3: Any) -> None:
    parts = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors(4).items()}

    out = flash_attn_3.flash_attn_with_kvcache(
        q=parts["q"],
        k_cache=parts["k"],
        v_cache=parts["v"],
        cache_seqlens=int32(3),
        page_table=int32(1).reshape(1, 1),
        cu_seqlens_q=int32(0, 2),
        max_seqlen_q=2,
        v_descale=torch.full((1, 1), 2.0),
    )

    assert out.dtype is torch.bfloat16
    assert out[:, 0, 0].tolist() == [4.0, 4.0]  # twice the mean of 1, 2, 3


def test_flash_attn_3_refuses_what_the_wheel_was_built_without(flash_attn_3: Any) -> None:
    parts = tensors(4)

    with pytest.raises(RuntimeError, match="does not support softcap"):
        flash_attn_3.flash_attn_with_kvcache(
            q=parts["q"], k_cache=parts["k"], v_cache=parts["v"], softcap=1.0
        )
    with pytest.raises(RuntimeError, match="a descale of value needs fp8"):
        flash_attn_3.flash_attn_with_kvcache(
            q=parts["q"].unsqueeze(0),
            k_cache=parts["k"],
            v_cache=parts["v"],
            cache_seqlens=int32(3),
            page_table=int32(1).reshape(1, 1),
            v_descale=torch.full((1, 1), 2.0),
        )


def test_flash_attn_3_says_what_it_was_built_with(flash_attn_3: Any) -> None:
    config = importlib.import_module("flash_attn_config")

    assert config.CONFIG["build_flags"]["FLASHATTENTION_DISABLE_PAGEDKV"] is False
    assert flash_attn_3.get_scheduler_metadata(1, 2, 3, 1, 1, 8, int32(3)).dtype is torch.int32


def test_flash_attn_4_takes_lengths_one_way() -> None:
    stub, module, name, page, arguments = PAGED["flash_attn_4"]
    with stub_vendor(stub):
        function = getattr(importlib.import_module(module), name)
        out, lse = function(**tensors(page), **{**arguments, "return_lse": False})
        assert lse is None
        assert out.shape == (2, 1, 16)
        with pytest.raises(RuntimeError, match="page_table excludes cu_seqlens_k"):
            function(**tensors(page), **arguments, cu_seqlens_k=int32(0, 3))


def unified(**changes: Any) -> dict[str, Any]:
    return {
        **tensors(16),
        "out": torch.zeros(2, 1, 16, dtype=torch.bfloat16),
        "cu_seqlens_q": int32(0, 2),
        "max_seqlen_q": 2,
        "seqused_k": int32(3),
        "max_seqlen_k": 3,
        "softmax_scale": 1.0,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": int32(1).reshape(1, 1),
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        **changes,
    }


@pytest.mark.parametrize(
    ("stub", "module"),
    [
        (AITER_0_1_7, "aiter.ops.triton.unified_attention"),
        (AITER_HEAD, "aiter.ops.triton.attention.unified_attention"),
        (AITER_HEAD, "aiter.ops.triton.unified_attention"),
    ],
)
def test_unified_attention_writes_out_and_returns_nothing(stub: VendorStub, module: str) -> None:
    with stub_vendor(stub):
        function = importlib.import_module(module).unified_attention
        arguments = unified()
        assert function(**arguments) is None
        assert arguments["out"][:, 0, 0].tolist() == [1.5, 2.0]
        arguments = unified(window_size=(0, 0))
        function(**arguments)
        assert arguments["out"][:, 0, 0].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"causal": False}, AssertionError, "only causal"),
        ({"q_descale": torch.ones(1)}, AssertionError, "q_descale"),
        ({"out": torch.zeros(2, 1, 16)}, RuntimeError, "out must be bfloat16"),
        ({"window_size": (-1, 3)}, RuntimeError, "the window's right is 3"),
    ],
    ids=["causal", "q_descale", "out", "right"],
)
def test_unified_attention_refuses(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with stub_vendor(AITER_0_1_7):
        module = importlib.import_module("aiter.ops.triton.unified_attention")
        with pytest.raises(error, match=words):
            module.unified_attention(**unified(**changes))


def test_aiters_sink_is_an_argument_of_its_repository_alone() -> None:
    _, module, name, page, arguments = PAGED["aiter_0_1_7"]
    arguments = {**tensors(page), **arguments, "causal": True, "sink_ptr": torch.zeros(1)}
    with stub_vendor(AITER_HEAD):
        out, _ = getattr(importlib.import_module(module), name)(**arguments)
        assert out[:, 0, 0].tolist() == [1.0, 1.5]
    with (
        stub_vendor(AITER_0_1_7),
        pytest.raises(TypeError, match="unexpected keyword argument 'sink_ptr'"),
    ):
        getattr(importlib.import_module(module), name)(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"cu_seqlens_k": int32(0, 3)}, AssertionError, "exactly one of"),
        ({"num_splits": 2}, NotImplementedError, "num_splits"),
        ({"k_descale": torch.ones(1)}, NotImplementedError, "both KV cache descaled"),
        (
            {"k_descale": torch.ones(1, 1).expand(1, 1), "v_descale": torch.ones(2)[:1]},
            AssertionError,
            "v_descale must be view of single scalar tensor",
        ),
        ({"fa_version": 3}, NotImplementedError, "not support yet"),
        ({"window_size": (1, 0, 0)}, AssertionError, "window_size"),
        ({"window_size": (1, 0)}, RuntimeError, "is_local=false and is_sink=false"),
        ({"softcap": 2.0}, RuntimeError, "drops softcap"),
        ({"alibi_slopes": torch.ones(1)}, RuntimeError, "drops alibi_slopes"),
        ({"s_aux": torch.ones(1), "return_softmax_lse": False}, RuntimeError, "are read as"),
    ],
    ids=[
        *("lengths", "splits", "lone-descale", "descale", "version", "window"),
        *("windowed-lse", "softcap", "slopes", "sinks"),
    ],
)
def test_vllm_xpu_kernels_refuses(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    stub, module, name, page, arguments = PAGED["vllm_xpu_kernels"]
    with stub_vendor(stub):
        function = getattr(importlib.import_module(module), name)
        with pytest.raises(error, match=words):
            function(**{**tensors(page), **arguments, **changes})


def test_ragged_keys_need_no_table() -> None:
    parts = tensors(16)
    with stub_vendor(VLLM_XPU_KERNELS):
        function = importlib.import_module("vllm_xpu_kernels").flash_attn_varlen_func
        out = torch.zeros(2, 1, 16, dtype=torch.bfloat16)
        returned = function(
            q=parts["q"],
            k=parts["k"][1, :3],
            v=parts["v"][1, :3],
            max_seqlen_q=2,
            cu_seqlens_q=int32(0, 2),
            max_seqlen_k=3,
            cu_seqlens_k=int32(0, 3),
            out=out,
        )

    assert returned is out
    assert out[:, 0, 0].tolist() == [2.0, 2.0]  # not causal


def early_call(*key_lens: int, query_lens: tuple[int, ...]) -> Tensor:
    """Return the LSE (1, T) of FlashAttention 2 over pages, from keys of zeros in block 1."""
    starts = torch.tensor((0, *query_lens)).cumsum(0).int()
    with stub_vendor(FLASH_ATTN_2):
        function = importlib.import_module("flash_attn").flash_attn_varlen_func
        result = function(
            **tensors(256, int(starts[-1])),
            cu_seqlens_q=starts,
            cu_seqlens_k=torch.tensor((0, *key_lens)).cumsum(0).int(),
            max_seqlen_q=max(query_lens),
            max_seqlen_k=max(key_lens),
            block_table=torch.ones(len(key_lens), 1, dtype=torch.int32),
            return_attn_probs=True,
        )
    lse: Tensor = result[1]
    return lse


def test_flash_attention_2_writes_the_lse_of_keyless_pages_elsewhere() -> None:
    # Rows of 1, 1 and 2; request 1 begins at row 1 and writes where requests are 2 apart.
    lse = early_call(1, 0, 1, query_lens=(1, 1, 2))
    assert lse.tolist() == [[0.0, 0.0, math.inf, 0.0]]


def test_flash_attention_2_writes_past_the_lse_of_keyless_pages() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        early_call(1, 1, 0, query_lens=(1, 1, 2))
