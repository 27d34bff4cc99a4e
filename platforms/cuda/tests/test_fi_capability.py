"""What the two FlashInfer backends refuse, with the value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from fa_testing import build_of, inventory, request
from fi_testing import B200, H200

from attn_cuda.backends.flashinfer import FlashInferBackend
from attn_cuda.backends.flashinfer_trtllm import FlashInferTrtllmBackend
from attn_shared.backend import AttentionBackend
from attn_shared.device import DeviceFacts, preset

INSTALLED = inventory(flashinfer=None)


def reasons(
    backend: type[AttentionBackend], device: DeviceFacts = H200, **fields: Any
) -> dict[str, str]:
    found = backend.validate_configuration(request(**fields), device, INSTALLED)
    return {reason.code: str(reason) for reason in found}


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"block_size": 15}, "block_size", "block_size=15 (allowed: a multiple of 16"),
        ({"head_size": 96}, "head_size", "head_size=96 (allowed: 64, 128, 256"),
        ({"head_size": 512}, "head_size", "head_size=512"),
        ({"head_size_v": 64}, "head_size_v", "head_size_v=64 (allowed: 128"),
        ({"has_sinks": True}, "sink", "sink=True (allowed: False"),
        ({"has_alibi": True}, "alibi", "alibi=True (allowed: False"),
        ({"window": (7, 7), "non_causal": True}, "two_sided_window", "(7, 7)"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype", "kv_cache_dtype=nvfp4 (allowed: auto, fp8"),
        ({"batch_invariant": True}, "batch_invariance", "True (allowed: False"),
        ({"per_head_quant_scales": True}, "per_head_quant_scales", "True (allowed: False"),
        ({"softcap": 30.0, "needs_lse": True}, "lse", "False with softcap"),
        ({"softcap": 30.0, "dcp_size": 2}, "lse", "False with softcap"),
        ({"kv_cache_dtype": "fp8", "needs_lse": True}, "lse", "False over an fp8 cache"),
        ({"num_heads": 10, "num_kv_heads": 2, "needs_lse": True}, "lse", "with 5 query heads per"),
    ],
)
def test_what_flashinfers_own_kernels_lack(fields: dict[str, Any], code: str, words: str) -> None:
    found = reasons(FlashInferBackend, **fields)
    assert set(found) == {code}
    assert words in found[code]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window": (7, 0), "softcap": 30.0},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"non_causal": True, "window": (7, None)},
        {"num_heads": 7, "num_kv_heads": 1, "head_size": 256, "dtype": "float16"},
    ],
)
def test_what_they_have(fields: dict[str, Any]) -> None:
    for name in ("h200", "a100", "rtx5090", "b200"):
        assert reasons(FlashInferBackend, preset(name), **fields) == {}


def test_an_lse_is_of_hoppers_kernels() -> None:
    for heads in ((8, 8), (16, 8), (24, 8), (32, 8), (64, 8)):
        fields = dict(zip(("num_heads", "num_kv_heads"), heads, strict=True))
        assert reasons(FlashInferBackend, **fields, needs_lse=True, dcp_size=2) == {}
    for name in ("a100", "b200", "rtx5090"):
        assert set(reasons(FlashInferBackend, preset(name), needs_lse=True)) == {"lse"}


@pytest.mark.parametrize(
    ("device", "fields", "code"),
    [
        (H200, {"block_size": 48}, "block_size"),
        (H200, {"block_size": 256}, "block_size"),
        (H200, {"has_sinks": True}, "sink"),
        (H200, {"needs_lse": True}, "lse"),
        (H200, {"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        (H200, {"softcap": 30.0}, "softcap"),
        (H200, {"dcp_size": 2}, "dcp"),
        (H200, {"num_heads": 40, "num_kv_heads": 2}, "num_heads"),
        (H200, {"num_heads": 64, "num_kv_heads": 1}, "num_heads"),
        (B200, {"block_size": 48}, "block_size"),
        (B200, {"block_size": 128, "num_kv_heads": 32}, "block_size"),
        (B200, {"kv_cache_dtype": "nvfp4", "kv_layout": "NHD"}, "kv_layout"),
        (B200, {"kv_cache_dtype": "nvfp4", "non_causal": True}, "non_causal"),
        (B200, {"has_sinks": True, "non_causal": True}, "sink"),
        (preset("a100"), {}, "device"),
        (preset("rtx5090"), {}, "device"),
    ],
)
def test_what_trtllm_lacks(device: DeviceFacts, fields: dict[str, Any], code: str) -> None:
    assert code in reasons(FlashInferTrtllmBackend, device, **fields)


def test_what_trtllm_has_on_blackwell() -> None:
    for size in (16, 32, 64, 128, 256, 512, 1024):
        assert reasons(FlashInferTrtllmBackend, B200, block_size=size) == {}
    for fields in ({"has_sinks": True}, {"kv_cache_dtype": "nvfp4"}, {"needs_lse": True}):
        assert reasons(FlashInferTrtllmBackend, B200, **fields) == {}
    layout = FlashInferTrtllmBackend.capability(B200, INSTALLED).kv_layouts[0]
    assert layout == "HND"


def test_kernels_that_cannot_be_had_are_told_with_what_brings_them() -> None:
    bare = inventory(flashinfer=build_of({"compiler": "off", "jit_cache": "unknown"}))
    (reason,) = FlashInferBackend.validate_configuration(request(), H200, bare)
    assert (reason.code, reason.value) == ("compiler", "no nvcc, no flashinfer-jit-cache")
    assert "flashinfer-jit-cache" in reason.hint
    for flags in (
        {"compiler": "on", "jit_cache": "unknown"},
        {"compiler": "off", "jit_cache": "1"},
    ):
        served = inventory(flashinfer=build_of(flags))
        assert FlashInferBackend.validate_configuration(request(), H200, served) == ()


def test_trtllm_gen_wants_its_compiled_kernels_and_xqa_none() -> None:
    built = {"compiler": "on", "jit_cache": "unknown", "cubins": "unknown"}
    without = inventory(flashinfer=build_of(built))
    (reason,) = FlashInferTrtllmBackend.validate_configuration(request(), B200, without)
    assert (reason.code, reason.value) == ("cubins", "not installed")
    assert "flashinfer-cubin" in reason.hint
    assert FlashInferTrtllmBackend.validate_configuration(request(), H200, without) == ()
    with_them = inventory(flashinfer=build_of({**built, "cubins": "0.7.4"}))
    assert FlashInferTrtllmBackend.validate_configuration(request(), B200, with_them) == ()
