"""What AITER is handed, argument by argument: name, dtype, shape, strides, device and value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aiter_testing import HEAD, MI300X, MI355X, WHEEL, layer_spec, run
from torch import Tensor

from attn_conformance.stubs.recorder import VendorCall
from attn_rocm._aiter_calls import workspace_bytes
from attn_rocm.backends.rocm_aiter_unified_attn import AiterUnifiedBackend
from attn_shared.device import DeviceFacts
from attn_shared.reference import AttentionOptions, varlen_attention
from attn_shared.request import AttentionType

ROWS = {"query": (256, 64, 1), "cache": (4096, 128, 64, 1)}
"""Strides of rows of 4 heads of 64, and of blocks of 16 tokens of 2 heads, K and V."""


def told(call: VendorCall) -> dict[str, Any]:
    """Return what each given argument is: of a tensor its form, of anything else the value."""
    return {name: _form(call.arguments[name]) for name in call.given}


def _form(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return (str(value.dtype)[6:], tuple(value.shape), value.stride(), value.device.type)


def int32(*shape: int) -> tuple[object, ...]:
    strides = (shape[1], 1) if len(shape) == 2 else (1,)
    return ("int32", shape, strides, "cpu")


def bf16(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[object, ...]:
    return ("bfloat16", shape, strides, "cpu")


PAGES = bf16((6, 16, 2, 64), ROWS["cache"])
ONE = ("float32", (1,), (1,), "cpu")


@pytest.mark.parametrize("release", [WHEEL, HEAD])
def test_every_argument_of_the_paged_decode(release: str) -> None:
    spec = layer_spec()
    (call,) = run(release, spec).of("paged_attention_v1")
    size = workspace_bytes(spec, 1, 33)
    assert told(call) == {
        "out": bf16((1, 4, 64), ROWS["query"]),
        "workspace_buffer": ("uint8", (size,), (1,), "cpu"),
        "query": bf16((1, 4, 64), ROWS["query"]),
        "key_cache": PAGES,
        "value_cache": PAGES,
        "scale": 0.25,
        "block_tables": int32(1, 3),
        "cu_query_lens": None,
        "context_lens": int32(1),
        "max_context_len": 33,
        "alibi_slopes": None,
        "kv_cache_dtype": "auto",
        "kv_cache_layout": "NHD",
        "logits_soft_cap": 0.0,
        "k_scale": ONE,
        "v_scale": ONE,
        "partition_size": 256,
    }
    assert call.arguments["context_lens"].tolist() == [20]
    assert call.arguments["block_tables"].tolist() == [[0, 1, 2]]
    assert call.arguments["k_scale"].item() == call.arguments["v_scale"].item() == 1.0
    key, value = call.arguments["key_cache"], call.arguments["value_cache"]
    assert value.data_ptr() - key.data_ptr() == 16 * 2 * 64 * 2, "V follows K inside a block"


def test_the_workspace_has_room_for_each_part() -> None:
    spec = layer_spec()  # bfloat16, 4 heads of 64: a part is 128 bytes and two floats
    assert workspace_bytes(spec, 3, 256) == 3 * 4 * 1 * (128 + 8)
    assert workspace_bytes(spec, 3, 257) == 3 * 4 * 2 * (128 + 8)


@pytest.mark.parametrize(("device", "dtype"), [(MI300X, "e4m3fnuz"), (MI355X, "e4m3fn")])
def test_a_decode_of_an_fp8_cache_says_so_and_scales(device: DeviceFacts, dtype: str) -> None:
    cache = {"dtype": device.fp8_dtype, "kv_cache_dtype": "fp8"}
    layer = {"k_scale": 0.5, "v_scale": torch.tensor(2.0)}
    recorder = run(WHEEL, layer_spec(cache=cache), device=device, layer=layer)
    (call,) = recorder.of("paged_attention_v1")
    assert call.arguments["kv_cache_dtype"] == "fp8"
    assert str(call.arguments["key_cache"].dtype) == f"torch.float8_{dtype}"
    assert (call.arguments["k_scale"].tolist(), call.arguments["v_scale"].tolist()) == ([0.5], [2])
    (prompt,) = recorder.of("flash_attn_varlen_func")
    assert prompt.arguments["k"].dtype is torch.bfloat16, "prompts read it widened"


def test_every_argument_of_the_wheels_paged_prefill() -> None:
    (call,) = run(WHEEL, layer_spec()).of("mha_batch_prefill_func")
    tokens = bf16((176, 2, 64), (128, 64, 1))  # 5 blocks of 32 tokens' room, 16 of the last
    assert told(call) == {
        "q": bf16((3, 4, 64), ROWS["query"]),
        "k": tokens,
        "v": tokens,
        "cu_seqlens_q": int32(2),
        "kv_indptr": int32(2),
        "kv_page_indices": int32(33),
        "max_seqlen_q": 3,
        "max_seqlen_k": 33,
        "softmax_scale": 0.25,
        "logits_soft_cap": 0.0,
        "causal": True,
        "window_size": (-1, -1),
        "alibi_slopes": None,
        "return_lse": False,
        "out": bf16((3, 4, 64), ROWS["query"]),
    }
    assert call.arguments["cu_seqlens_q"].tolist() == [0, 3]
    assert call.arguments["kv_indptr"].tolist() == [0, 33]
    # The second request has blocks 3, 4 and 5: each 32 tokens' room, of which 16 are keys.
    expected = [*range(96, 112), *range(128, 144), 160]
    assert call.arguments["kv_page_indices"].tolist() == expected


def test_every_argument_of_the_heads_paged_prefill() -> None:
    (call,) = run(HEAD, layer_spec()).of("mha_batch_prefill_func")
    assert told(call) == {
        "q": bf16((3, 4, 64), ROWS["query"]),
        "k": PAGES,
        "v": PAGES,
        "cu_seqlens_q": int32(2),
        "kv_indptr": int32(2),
        "kv_page_indices": int32(1),
        "block_table": int32(1, 3),
        "seqlen_k": int32(1),
        "max_seqlen_q": 3,
        "max_seqlen_k": 33,
        "softmax_scale": 0.25,
        "logits_soft_cap": 0.0,
        "causal": True,
        "window_size": (-1, -1),
        "alibi_slopes": None,
        "return_lse": False,
        "out": bf16((3, 4, 64), ROWS["query"]),
    }
    assert call.arguments["block_table"].tolist() == [[3, 4, 5]]
    assert call.arguments["seqlen_k"].tolist() == [33]


@pytest.mark.parametrize(("release", "window"), [(WHEEL, (-1, -1)), (HEAD, (-1, -1, 0))])
def test_every_argument_of_the_call_over_rows(release: str, window: tuple[int, ...]) -> None:
    recorder = run(release, layer_spec(), query_lens=(1, 3, 2), seq_lens=(20, 3, 2))
    (call,) = recorder.of("flash_attn_varlen_func")
    assert told(call) == {
        "q": bf16((5, 4, 64), ROWS["query"]),
        "k": bf16((5, 2, 64), (128, 64, 1)),
        "v": bf16((5, 2, 64), (128, 64, 1)),
        "cu_seqlens_q": int32(3),
        "cu_seqlens_k": int32(3),
        "max_seqlen_q": 3,
        "max_seqlen_k": 20,
        "softmax_scale": 0.25,
        "logits_soft_cap": 0.0,
        "causal": True,
        "window_size": window,
        "alibi_slopes": None,
        "return_lse": False,
        "out": bf16((5, 4, 64), ROWS["query"]),
    }
    assert call.arguments["cu_seqlens_q"].tolist() == [0, 3, 5]
    assert call.arguments["cu_seqlens_k"].tolist() == [0, 3, 5]


@pytest.mark.parametrize("release", [WHEEL, HEAD])
def test_every_argument_of_the_unified_call(release: str) -> None:
    (call,) = run(release, layer_spec(), backend=AiterUnifiedBackend).of("unified_attention")
    assert told(call) == {
        "q": bf16((4, 4, 64), ROWS["query"]),
        "k": PAGES,
        "v": PAGES,
        "out": bf16((4, 4, 64), ROWS["query"]),
        "cu_seqlens_q": int32(3),
        "max_seqlen_q": 3,
        "seqused_k": int32(2),
        "max_seqlen_k": 33,
        "softmax_scale": 0.25,
        "causal": True,
        "window_size": (-1, 0),
        "block_table": int32(2, 3),
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "alibi_slopes": None,
        "sinks": None,
    }
    assert call.arguments["cu_seqlens_q"].tolist() == [0, 1, 4]
    assert call.arguments["seqused_k"].tolist() == [20, 33]
    assert call.arguments["block_table"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_unified_call_takes_sinks_slopes_windows_and_scales_of_a_cache() -> None:
    sinks, slopes = torch.zeros(4), torch.full((4,), 0.5)
    spec = layer_spec(has_sinks=True, window=(7, 0))
    (call,) = run(WHEEL, spec, backend=AiterUnifiedBackend, layer={"sinks": sinks}).calls
    assert call.arguments["sinks"] is sinks
    assert call.arguments["window_size"] == (7, 0), "keys beside the row's own, the call adds it"
    spec = layer_spec(has_alibi=True)
    (call,) = run(WHEEL, spec, backend=AiterUnifiedBackend, layer={"alibi_slopes": slopes}).calls
    assert call.arguments["alibi_slopes"] is slopes
    spec = layer_spec(cache={"dtype": torch.float8_e4m3fnuz, "kv_cache_dtype": "fp8"})
    layer = {"k_scale": 0.5, "v_scale": 2.0}
    (call,) = run(WHEEL, spec, backend=AiterUnifiedBackend, layer=layer).calls
    for name, scale in (("k_descale", 0.5), ("v_descale", 2.0)):
        assert _form(call.arguments[name]) == ONE
        assert call.arguments[name].item() == scale


def test_a_window_over_all_keys_keeps_what_machine_code_would_drop() -> None:
    """Over rows a call without one may lose a cap (the wheel) or sinks (the repository)."""
    prompts: dict[str, Any] = {"query_lens": (3, 2), "seq_lens": (3, 2)}
    sinks = {"sinks": torch.zeros(4)}

    def window(release: str, layer: dict[str, Any] | None = None, **fields: Any) -> object:
        spec = layer_spec(head_size=128, head_size_v=128, **fields)
        (call,) = run(release, spec, layer=layer, **prompts).of("flash_attn_varlen_func")
        given = call.arguments
        options: dict[str, Any] = {"softcap": spec.softcap, "window": spec.window, **(layer or {})}
        exact = varlen_attention(
            given["q"],
            given["k"],
            given["v"],
            AttentionOptions(scale=spec.scale, **options),
            query_start_loc=given["cu_seqlens_q"],
            key_start_loc=given["cu_seqlens_k"],
            causal=True,
        )
        torch.testing.assert_close(given["out"].double(), exact.output, atol=0.02, rtol=0.02)
        return given["window_size"]

    assert window(WHEEL) == (-1, -1)
    assert window(WHEEL, softcap=30.0) == (2, 0)
    assert window(HEAD, sinks, has_sinks=True) == (2, 0, 0)
    assert window(HEAD, sinks, has_sinks=True, window=(1, 0)) == (1, 0, 0)


@pytest.mark.parametrize("release", [WHEEL, HEAD])
def test_an_lse_of_alibi_is_taken_by_distance(release: str) -> None:
    layer = {"alibi_slopes": torch.full((4,), 0.5)}
    recorder = run(release, layer_spec(has_alibi=True), layer=layer, with_lse=True)
    (call,) = recorder.calls
    assert call.arguments["window_size"][:2] == (32, 0)
    assert call.arguments["return_lse"] is True
    assert call.arguments["alibi_slopes"].dtype is torch.float32


@pytest.mark.parametrize("release", [WHEEL, HEAD])
def test_single_queries_are_never_announced_as_such(release: str) -> None:
    """With 1 as the longest query the call has given wrong numbers (ROCm/aiter#2229)."""
    spec = layer_spec(window=(7, 0))
    recorder = run(release, spec, query_lens=(1, 1), seq_lens=(20, 33))
    (call,) = recorder.of("mha_batch_prefill_func")
    assert call.arguments["max_seqlen_q"] == 2


@pytest.mark.parametrize("release", [WHEEL, HEAD])
def test_heads_of_256_are_gathered_for_the_call_over_rows(release: str) -> None:
    spec = layer_spec(head_size=256, head_size_v=256)
    recorder = run(release, spec, query_lens=(1, 3), seq_lens=(20, 33))
    (call,) = recorder.of("flash_attn_varlen_func")
    assert recorder.of("mha_batch_prefill_func") == []
    assert call.arguments["cu_seqlens_k"].tolist() == [0, 33]
    assert tuple(call.arguments["k"].shape) == (33, 2, 256)


def test_a_release_with_tables_reads_blocks_of_32_token_by_token() -> None:
    recorder = run(HEAD, layer_spec(block_size=32))
    (call,) = recorder.of("mha_batch_prefill_func")
    assert "block_table" not in call.given
    assert call.arguments["k"].ndim == 3


@pytest.mark.parametrize("release", [WHEEL, HEAD])
def test_a_negative_scale_goes_to_the_query(release: str) -> None:
    (call,) = run(release, layer_spec(scale=-0.5), query_lens=(1,), seq_lens=(20,)).calls
    assert call.arguments["scale"] == 0.5


@pytest.mark.parametrize("release", [WHEEL, HEAD])
def test_encoders_bring_their_keys(release: str) -> None:
    spec = layer_spec(attn_type=AttentionType.ENCODER_ONLY, kv_cache_spec=None)
    (call,) = run(release, spec, query_lens=(1, 3), seq_lens=(1, 3)).calls
    assert (call.function, call.arguments["causal"]) == ("flash_attn_varlen_func", False)
    assert call.arguments["cu_seqlens_k"].tolist() == [0, 1, 4]
