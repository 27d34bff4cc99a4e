"""What each library is handed: by keyword, under its own names, and nothing that it lacks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fa_testing import STUBS, common_of, layer_object, layer_spec, stubbed

from attn_conformance.stubs.recorder import VendorCall
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3_PYTHON
from attn_conformance.stubs.vendors.vllm_flash_attn import VLLM_FLASH_ATTN_3_FUNCTION
from attn_cuda._fa_calls import load
from attn_cuda.backends.flash_attn import FlashAttnImpl, FlashAttnMetadataBuilder
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig, LayerSpec

KERNELS = {
    "flash_attn": "flash_attn_varlen_func",
    "flash_attn_3": "fwd",
    "flash_attn_4": "flash_attn_varlen_func",
    "vllm_flash_attn_2": "flash_attn_varlen_func",
    "vllm_flash_attn_3": "fwd",
}
TABLES = dict.fromkeys(("flash_attn_3", "flash_attn_4", "vllm_flash_attn_3"), "page_table")


def run(
    name: str,
    spec: LayerSpec,
    *,
    layer: dict[str, Any] | None = None,
    with_lse: bool = False,
    with_output: bool = True,
    query_lens: tuple[int, ...] = (1, 3),
    seq_lens: tuple[int, ...] = (20, 33),
    kernel: str | None = None,
) -> list[VendorCall]:
    """Run one step, and return the calls of the kernel."""
    with stubbed(name) as (recorder, _):
        cache_spec = spec.kv_cache_spec
        size = 16 if cache_spec is None else cache_spec.block_size
        common = common_of(list(query_lens), list(seq_lens), size)
        if cache_spec is None:
            common = common.with_fields(block_table=None, causal=False)
        builder = FlashAttnMetadataBuilder(
            cache_spec, {"layer": spec}, BuildConfig(), torch.device("cpu")
        )
        count = common.num_actual_tokens
        query = torch.randn(count, spec.num_heads, spec.head_size).to(spec.dtype)
        key = value = cache = None
        if cache_spec is None:
            key = value = query[:, : spec.num_kv_heads]
        else:
            table = common.block_table
            assert table is not None
            cache = cache_spec.allocate(table.numel(), "cpu")  # type: ignore[attr-defined]
        FlashAttnImpl(spec).forward(
            layer_object(**(layer or {})),
            query,
            key,
            value,
            cache,
            builder.build(0, common),
            torch.empty_like(query) if with_output else None,
            lse=torch.empty(spec.num_heads, count) if with_lse else None,
        )
        return recorder.of(kernel or KERNELS[name])


def spec_for(name: str, **fields: Any) -> LayerSpec:
    return layer_spec(block_size=256 if name == "flash_attn" else 16, **fields)


@pytest.mark.parametrize("name", KERNELS)
def test_every_call_is_by_keyword_with_scale_and_table(name: str) -> None:
    (call,) = run(name, spec_for(name, scale=0.7))
    by_position = name == "vllm_flash_attn_3"  # an operator without a default, names compared
    assert bool(call.positional) is by_position
    assert call.arguments["softmax_scale"] == 0.7
    assert call.arguments[TABLES.get(name, "block_table")].shape[0] == 2
    assert call.arguments["causal" if "causal" in call.arguments else "is_causal"] is True


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flash_attn", (4, -1)),
        ("flash_attn_4", (4, None)),
        ("vllm_flash_attn_2", (4, -1)),
    ],
)
def test_an_unbounded_side_is_written_as_each_library_writes_it(
    name: str, expected: tuple[int, int | None]
) -> None:
    (call,) = run(name, spec_for(name, window=(4, None)))
    assert tuple(call.arguments["window_size"]) == expected


@pytest.mark.parametrize("name", ["flash_attn_3", "vllm_flash_attn_3"])
def test_an_operator_takes_both_sides_apart(name: str) -> None:
    (call,) = run(name, spec_for(name, window=(4, None)))
    assert (call.arguments["window_size_left"], call.arguments["window_size_right"]) == (4, -1)


@pytest.mark.parametrize(
    ("name", "lengths", "none"),
    [
        ("flash_attn", "cu_seqlens_k", ()),
        ("flash_attn_3", "seqused_k", ("cu_seqlens_k",)),
        ("flash_attn_4", "seqused_k", ("cu_seqlens_k",)),
        ("vllm_flash_attn_2", "seqused_k", ("cu_seqlens_k",)),
        ("vllm_flash_attn_3", "seqused_k", ("cu_seqlens_k",)),
    ],
)
def test_lengths_of_pages(name: str, lengths: str, none: tuple[str, ...]) -> None:
    (call,) = run(name, spec_for(name))
    expected = [0, 20, 53] if lengths == "cu_seqlens_k" else [20, 33]
    assert call.arguments[lengths].tolist() == expected
    assert all(call.arguments[other] is None for other in none)


@pytest.mark.parametrize("name", KERNELS)
def test_starts_of_keys_that_come_with_the_call(name: str) -> None:
    encoder = layer_spec(attn_type=AttentionType.ENCODER_ONLY, kv_cache_spec=None)
    (call,) = run(name, encoder, seq_lens=(1, 3))
    assert call.arguments["cu_seqlens_k"].tolist() == [0, 1, 4]
    assert call.arguments[TABLES.get(name, "block_table")] is None


@pytest.mark.parametrize("name", ["flash_attn_3", "vllm_flash_attn_2", "vllm_flash_attn_3"])
def test_an_output_is_handed_on_where_the_call_takes_one(name: str) -> None:
    (call,) = run(name, spec_for(name))
    assert isinstance(call.arguments["out"], torch.Tensor)
    (call,) = run(name, spec_for(name), with_output=False)
    assert call.arguments["out"] is None


def test_the_version_is_part_of_the_call_of_vllms_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STUBS, "vllm_flash_attn_3", VLLM_FLASH_ATTN_3_FUNCTION)
    for version in (2, 3):
        name = f"vllm_flash_attn_{version}"
        (call,) = run(name, spec_for(name), kernel="flash_attn_varlen_func")
        assert call.arguments["fa_version"] == version
        assert call.positional == ()
        assert tuple(call.arguments["window_size"]) == (-1, -1)


@pytest.mark.parametrize(
    ("name", "argument", "dtype"),
    [
        ("flash_attn_3", "sinks", torch.bfloat16),
        ("vllm_flash_attn_3", "s_aux", torch.bfloat16),
        ("flash_attn_4", "learnable_sink", torch.float32),
    ],
)
def test_sinks_have_the_dtype_that_the_kernel_takes(
    name: str, argument: str, dtype: torch.dtype
) -> None:
    layer = {"sinks": torch.ones(4)}
    (call,) = run(name, spec_for(name, has_sinks=True), layer=layer)
    assert call.arguments[argument].dtype is dtype


@pytest.mark.parametrize("name", ["flash_attn_3", "vllm_flash_attn_3"])
def test_fp8_query_and_factors(name: str) -> None:
    fp8 = spec_for(name, cache={"dtype": torch.float8_e4m3fn, "kv_cache_dtype": "fp8"})
    layer = {"q_scale": 0.25, "k_scale": 0.5, "v_scale": torch.tensor([1.0, 2.0])}
    (call,) = run(name, fp8, layer=layer)
    assert call.arguments["q"].dtype is torch.float8_e4m3fn
    assert call.arguments["q_descale"].tolist() == [[0.25, 0.25]] * 2
    assert call.arguments["k_descale"].tolist() == [[0.5, 0.5]] * 2
    assert call.arguments["v_descale"].tolist() == [[1.0, 2.0]] * 2


@pytest.mark.parametrize("name", ["flash_attn", "vllm_flash_attn_2"])
@pytest.mark.parametrize(
    ("fields", "with_lse", "window"),
    [
        ({}, False, (-1, -1)),
        ({}, True, (32, 0)),
        ({"window": (4, 0)}, True, (4, 0)),
    ],
    ids=["no-lse", "lse", "window"],
)
def test_slopes_are_added_by_distance_where_an_lse_is_asked_for(
    name: str, fields: dict[str, Any], with_lse: bool, window: tuple[int, int]
) -> None:
    spec = spec_for(name, has_alibi=True, **fields)
    (call,) = run(name, spec, layer={"alibi_slopes": torch.ones(4)}, with_lse=with_lse)
    assert tuple(call.arguments["window_size"]) == window
    assert call.arguments["alibi_slopes"].tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["flash_attn_3", "vllm_flash_attn_3"])
def test_the_schedule_is_handed_to_every_layer(name: str) -> None:
    (call,) = run(name, spec_for(name))
    assert call.arguments["scheduler_metadata"] is not None


def test_the_python_functions_of_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUBS, "flash_attn_3", FLASH_ATTN_3_PYTHON)
    spec = spec_for("flash_attn_3", window=(4, 0))
    (call,) = run("flash_attn_3", spec, kernel="flash_attn_with_kvcache")
    assert call.positional == ()
    assert call.arguments["cache_seqlens"].tolist() == [20, 33]
    assert call.arguments["window_size"] == (4, 0)
    assert call.arguments["scheduler_metadata"] is None


def test_softcap_is_named_only_where_there_is_one() -> None:
    name = "vllm_flash_attn_2"
    assert "softcap" not in run(name, spec_for(name))[0].given
    for name in ("vllm_flash_attn_2", "vllm_flash_attn_3"):
        assert run(name, spec_for(name, softcap=2.5))[0].arguments["softcap"] == 2.5
        assert math.isclose(run(name, spec_for(name))[0].arguments["softcap"], 0.0)


def test_a_library_that_is_not_there_does_not_load() -> None:
    with pytest.raises(ImportError, match="flash_attn_interface"):
        load("flash_attn_3")
