"""What TRITON_ATTN takes and refuses, on devices that need not be here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_conformance.batch import make_batch
from attn_conformance.case import Case
from attn_shared.device import resolve_device
from attn_shared.request import AttentionRequest, AttentionType
from attn_triton._capability import CAPABILITY, cache_bytes_of
from attn_triton.paged import TritonAttentionImpl


def codes(device: str, **options: Any) -> dict[str, str]:
    request = AttentionRequest(
        **{"num_heads": 32, "num_kv_heads": 8, "head_size": 128, **options},
    )
    return {
        reason.code: str(reason) for reason in CAPABILITY.check(request, resolve_device(device))
    }


@pytest.mark.parametrize("device", ["h200", "sm_80", "sm_120", "mi300x", "gfx1100", "bmg"])
def test_plain_layers_are_taken_on_every_vendors_gpus(device: str) -> None:
    assert codes(device) == {}


@pytest.mark.parametrize("device", ["spr", "t4"])
def test_other_devices_are_refused(device: str) -> None:
    assert set(codes(device)) == {"device"}


def test_a_head_size_of_1024_is_refused_with_the_limit() -> None:
    assert "allowed: 1 to 512" in codes("h200", head_size=1024)["head_size"]


def test_tiles_that_do_not_fit_are_refused_with_the_numbers() -> None:
    """float32 heads of 512: keys and values 16 x 1024 x 4, queries 16 x 512 x 4, 16 x 16 x 4."""
    wide = {"head_size": 512, "dtype": torch.float32}
    needed = 16 * 1024 * 4 + 16 * 512 * 4 + 16 * 16 * 4
    words = codes("mi300x", **wide)["shared_memory"]
    assert f"{needed} bytes" in words
    assert "at most 65536 bytes on gfx942" in words
    assert codes("h200", **wide) == {}


@pytest.mark.parametrize(
    ("device", "kv_cache_dtype", "is_refused"),
    [
        ("h200", "fp8", False),
        ("sm_89", "fp8_e4m3", False),
        ("sm_80", "fp8", True),
        ("sm_80", "fp8_e5m2", False),
        ("sm_80", "int8_per_token_head", False),
        ("mi300x", "fp8", False),
        ("gfx90a", "fp8", True),
        ("gfx90a", "fp8_e5m2", False),
        ("gfx1201", "fp8", False),
        ("b60", "fp8", True),
        ("max1550", "fp8_e4m3", True),
        ("b60", "fp8_e5m2", False),
        ("b60", "int8_per_token_head", False),
    ],
)
def test_fp8_where_the_compiler_has_it(device: str, kv_cache_dtype: str, is_refused: bool) -> None:
    found = codes(device, kv_cache_dtype=kv_cache_dtype)
    assert set(found) == ({"fp8_on_device"} if is_refused else set())


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_constructor_which_is_told_no_device_takes_fp8(kv_cache_dtype: str) -> None:
    case = Case(name="fp8", query_lens=(1,), seq_lens=(3,), kv_cache_dtype=kv_cache_dtype)
    spec = make_batch(case, torch.device("cpu"), fp8_e4m3_dtype=torch.float8_e4m3fn).spec
    assert TritonAttentionImpl(spec).spec is spec


def test_a_plain_cache_has_the_layers_dtype() -> None:
    assert codes("h200", kv_cache_dtype="bfloat16") == {}
    assert "auto, bfloat16" in codes("h200", kv_cache_dtype="float16")["cache_dtype_of_layer"]


def test_chunks_and_ranges_are_of_causal_decoders() -> None:
    assert "chunked_local_causal" in codes("h200", chunk_size=64, non_causal=True)
    encoder = {"attn_type": AttentionType.ENCODER_ONLY}
    assert "mm_prefix_decoder" in codes("h200", use_mm_prefix=True, **encoder)


@pytest.mark.parametrize(
    ("name", "size"),
    [("auto", 2), ("float32", 4), ("fp8", 1), ("fp8_e5m2", 1), ("int8_per_token_head", 1)],
)
def test_bytes_of_a_cache_element(name: str, size: int) -> None:
    assert cache_bytes_of(name, 2) == size
