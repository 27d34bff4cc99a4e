from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attn_shared.capability import Support
from attn_shared.device import DeviceFacts, device_from_arch, preset
from attn_shared.dtypes import KV_CACHE_DTYPES, parse_dtype
from attn_shared.known_backends import KNOWN_BACKENDS
from attn_shared.known_limits import published_limits
from attn_shared.request import AttentionRequest, AttentionType, MLADims

Oracle = Callable[[str], list[dict[str, Any]]]

H100, B200 = preset("h100"), preset("b200")
PROVIDED_FROM_THE_START = {"TORCH_SDPA", "FLEX_ATTENTION", "FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"}
OURS = {"FLASHINFER_TRTLLM", "XPU_FLASH_ATTN", "IPEX", "TORCH_MLA", "CPU_MLA"}
LATENT = AttentionRequest(num_heads=16, num_kv_heads=1, head_size=576, mla=MLADims())


def test_every_name_that_attn_may_not_provide_has_its_limits() -> None:
    names = {name for name, known in KNOWN_BACKENDS.items() if known.family != "placeholder"}
    without = {name for name in names if published_limits(name, H100) is None}
    assert without == PROVIDED_FROM_THE_START | OURS


def test_the_family_of_a_name_and_of_its_limits_agree() -> None:
    for name, known in KNOWN_BACKENDS.items():
        limits = published_limits(name, H100)
        if limits is not None:
            assert limits.is_mla == (known.family in ("mla", "sparse_mla")), name
            assert limits.is_sparse == (known.family == "sparse_mla" or "SPARSE" in name), name
            assert {limit.vendor for limit in limits.devices} == set(known.vendors), name


def test_what_a_backend_would_say() -> None:
    limits = published_limits("FLASHMLA", H100)
    assert limits is not None
    assert limits.check(LATENT, H100) == ()
    (reason,) = limits.check(LATENT, B200)
    assert (reason.code, reason.allowed) == ("device", "nvidia family 9.x")
    (reason,) = limits.check(LATENT.with_options(block_size=16), H100)
    assert (reason.code, reason.allowed) == ("block_size", "a multiple of 64")


@pytest.mark.parametrize(
    ("device", "sinks", "nvfp4"), [(H100, Support.NO, False), (B200, Support.YES, True)]
)
def test_flashinfers_sinks_and_four_bits_are_of_one_family(
    device: DeviceFacts, sinks: Support, nvfp4: bool
) -> None:
    limits = published_limits("FLASHINFER", device)
    assert limits is not None
    assert (limits.sinks, "nvfp4" in limits.kv_cache_dtypes) == (sinks, nvfp4)


@pytest.mark.parametrize(
    ("device", "widest", "fp8"), [("a100", 256, False), ("h100", 512, True), ("b200", 512, False)]
)
def test_flash_attentions_limits_are_of_its_generations(
    device: str, widest: int, fp8: bool
) -> None:
    limits = published_limits("FLASH_ATTN_DIFFKV", preset(device))
    assert limits is not None
    assert (widest in limits.head_sizes, widest + 8 in limits.head_sizes) == (True, False)
    assert ("fp8" in limits.kv_cache_dtypes) == fp8


def test_a_name_without_limits() -> None:
    assert published_limits("NO_ATTENTION", H100) is None


def _device(row: dict[str, Any]) -> DeviceFacts:
    return device_from_arch({"xpu": "bmg"}.get(row["arch"], row["arch"]))


def _recorded_sizes(row: dict[str, Any]) -> set[int]:
    sizes = row["head_sizes"]
    if isinstance(sizes, list):
        return set(sizes)
    return set(range(sizes["from"], (sizes["to"] or 1024) + 1, sizes["step"]))


def test_limits_are_as_recorded(oracle: Oracle) -> None:
    """Every recorded class-level fact, on every recorded architecture of its own platform."""
    home = {"cuda": "nvidia", "rocm": "amd", "xpu": "intel", "cpu": "cpu"}
    compared = 0
    for row in oracle("capabilities"):
        known = KNOWN_BACKENDS.get(row["name"])
        limits = None if known is None else published_limits(row["name"], _device(row))
        if limits is None or known is None or "dtypes" not in row:
            continue
        if home[row["platform"]] not in known.vendors:
            continue
        where = f"{row['name']} on {row['arch']}"
        compared += 1
        assert limits.dtypes == {parse_dtype(name) for name in row["dtypes"]}, where
        assert limits.kv_cache_dtypes == set(row["kv_cache_dtypes"]) & set(KV_CACHE_DTYPES), where
        assert {n for n in range(1, 1025) if n in limits.head_sizes} == _recorded_sizes(row), where
        bases = {str(size).removeprefix("x") for size in row["kernel_block_sizes"]}
        assert {str(getattr(size, "base", size)) for size in limits.block_sizes} == bases, where
        assert limits.attn_types == {AttentionType(name) for name in row["attn_types"]}, where
        assert (limits.is_mla, limits.is_sparse) == (row["is_mla"], row["is_sparse"]), where
        flags = {
            "sinks": "supports_sink",
            "non_causal": "supports_non_causal",
            "batch_invariant": "supports_batch_invariance",
            "kv_connector": "supports_kv_connector",
        }
        for field, recorded in flags.items():
            assert (getattr(limits, field) is Support.YES) == row[recorded], f"{field}: {where}"
    assert compared > 60
