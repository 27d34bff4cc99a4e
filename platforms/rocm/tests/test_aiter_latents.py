"""ROCM_AITER_MLA, and AITER's prefill over latents, through stubs of both releases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from aiter_testing import HEAD, MI300X, MI355X, STUBS, WHEEL, inventory, stubbed

from attn_conformance.outcome import Status
from attn_conformance.stubs.modules import stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.suite import run_rules
from attn_conformance.subject import Subject
from attn_rocm._aiter_mla_capability import latents_capability
from attn_rocm.backends import rocm_aiter_mla
from attn_rocm.backends.rocm_aiter_mla import AiterMLABackend, AiterMLAImpl
from attn_rocm.mla_prefills import rocm_aiter_fa
from attn_rocm.mla_prefills.rocm_aiter_fa import AiterPrefill
from attn_rocm.platform import RocmPlatform
from attn_shared import reference
from attn_shared.accuracy import check_against_reference, eager_varlen_attention
from attn_shared.device import DeviceFacts, preset
from attn_shared.errors import UnsupportedOptionError, VendorMissingError
from attn_shared.inventory import VendorBuild
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.mla_context import ragged_part
from attn_shared.reference import AttentionOptions
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.spec import BuildConfig, LayerSpec

RELEASES = pytest.mark.parametrize("release", [WHEEL, HEAD])
LIGHT = (
    *("mla_decode", "mla_drafts", "mla_split", "mla_lse", "mla_fp8", "mla_padded_requests"),
    *("mla_unread", "mla_padded_blocks", "mla_output", "mla_graph_level"),
    *("mla_capture_pointers", "mla_replay", "mla_decode_input", "mla_layer"),
)


@contextmanager
def latents(release: str, device: DeviceFacts = MI300X) -> Iterator[tuple[Recorder, Subject]]:
    rocm_aiter_mla.DEVICES.forget()
    rocm_aiter_fa.DEVICES.forget()
    try:
        with stubbed(release, AiterMLABackend, device) as found:
            yield found
    finally:
        rocm_aiter_mla.DEVICES.forget()
        rocm_aiter_fa.DEVICES.forget()


def latent_request(dims: MLADims | None = None, **fields: Any) -> AttentionRequest:
    dims = dims or MLADims()
    return AttentionRequest(
        **{
            "num_heads": 16,
            "num_kv_heads": 1,
            "head_size": dims.latent_size,
            "mla": dims,
            "block_size": 16,
            **fields,
        }
    )


def latent_layer(dtype: torch.dtype = torch.bfloat16, **fields: Any) -> LayerSpec:
    dims = MLADims()
    cache = MLAAttentionSpec(
        block_size=16,
        dtype=dtype,
        kv_cache_dtype="auto" if dtype is torch.bfloat16 else "fp8",
        head_size=dims.latent_size,
        kv_lora_rank=dims.kv_lora_rank,
    )
    return LayerSpec(
        **{
            "num_heads": 16,
            "num_kv_heads": 1,
            "head_size": dims.latent_size,
            "head_size_v": dims.kv_lora_rank,
            "scale": 0.07,
            "dtype": torch.bfloat16,
            "kv_cache_spec": cache,
            "mla": dims,
            **fields,
        }
    )


@RELEASES
def test_each_release_keeps_the_contract(release: str) -> None:
    with latents(release) as (recorder, subject):
        outcomes = list(run_rules(subject, LIGHT))
    failed = {f"{o.rule} {o.name}": o.message for o in outcomes if o.status is Status.FAILED}
    assert failed == {}
    assert sum(o.status is Status.PASSED for o in outcomes) > 40
    assert {call.function for call in recorder.calls} == {"mla_decode_fwd"}
    assert not any(call.positional for call in recorder.calls)
    caches = {call.arguments["kv_buffer"].dtype for call in recorder.calls}
    assert torch.float8_e4m3fnuz in caches


@RELEASES
def test_an_lse_and_shards_are_the_heads_alone(release: str) -> None:
    with latents(release, MI355X) as (_, subject):
        for asked in ({"needs_lse": True}, {"dcp_size": 2}):
            reasons = subject.capability.check(latent_request(**asked), MI355X)
            assert (not reasons) is (release == HEAD)
        impl: Any = AiterMLAImpl(latent_layer())
    assert impl.can_return_lse is (release == HEAD)


@pytest.mark.parametrize(
    ("fields", "code", "allowed"),
    [
        ({"num_heads": 256}, "num_heads", "at most 128"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype", "auto, fp8, fp8_e4m3"),
        ({"dtype": torch.float32}, "dtype", "bfloat16, float16"),
        ({"dims": MLADims(kv_lora_rank=448, qk_rope_head_dim=128)}, "mla_dims", "512 with 64"),
        ({"dims": MLADims(kv_lora_rank=256)}, "head_size", "576"),
    ],
)
def test_what_is_refused_with_its_value(fields: dict[str, Any], code: str, allowed: str) -> None:
    capability = latents_capability(MI300X, inventory(None))
    (reason,) = capability.check(latent_request(**fields), MI300X)
    assert reason.code == code
    assert reason.allowed.startswith(allowed)


@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
def test_blocks_of_any_size(block_size: int) -> None:
    capability = latents_capability(MI300X, inventory(None))
    assert not capability.check(latent_request(block_size=block_size), MI300X)


def test_devices_and_releases_without_the_kernels() -> None:
    other = preset("rx7900xtx")
    capability = latents_capability(other, inventory(None))
    assert [r.code for r in capability.check(latent_request(), other)] == ["device"]
    old = inventory(VendorBuild(version="0.1.4", flags=(("mla_decode_fwd", "off"),)))
    (reason,) = latents_capability(MI300X, old).check(latent_request(), MI300X)
    assert reason.code == "aiter_calls"
    assert "without mla_decode_fwd" in reason.value


def test_a_cache_in_the_other_flavour_and_a_process_without_aiter() -> None:
    with (
        latents(HEAD),
        pytest.raises(UnsupportedOptionError, match=r"float8_e4m3fn is not .* on gfx942; allowed"),
    ):
        AiterMLAImpl(latent_layer(torch.float8_e4m3fn))
    with pytest.raises(VendorMissingError, match="ROCM_AITER_MLA is not loaded"):
        AiterMLAImpl(latent_layer())


@RELEASES
@pytest.mark.parametrize("scale", [0.07, -0.05])
@pytest.mark.parametrize(
    ("query_lens", "key_lens", "is_causal"),
    [([5, 33, 1], [5, 33, 1], True), ([3, 0, 2], [40, 0, 9], False), ([1, 1], [1, 1], True)],
)
def test_prefills(
    release: str, scale: float, query_lens: list[int], key_lens: list[int], is_causal: bool
) -> None:
    layer = latent_layer(num_heads=4, scale=scale)
    first, second = (
        torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()
        for lens in (query_lens, key_lens)
    )
    part = ragged_part(first, second, torch.device("cpu"), is_causal=is_causal)
    generator = torch.Generator().manual_seed(1)

    def draw(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, 4, width, generator=generator).to(layer.dtype)

    query, key = draw(part.num_queries, 192), draw(part.num_keys, 192)
    value = draw(part.num_keys, 256)[..., 128:]
    with stub_vendor(STUBS[release]) as recorder:
        AiterPrefill.load_vendor(MI300X, inventory(None))
        kernel = AiterPrefill(layer, BuildConfig(), torch.device("cpu"))
        part = replace(part, plan=kernel.prepare(part))
        given = torch.full((len(query), 4, 128), torch.nan, dtype=layer.dtype)
        output, lse = kernel.run(query, key, value, part, output=given, returns_lse=True)
        plain, nothing = kernel.run(query, key, value, part)
    options: dict[str, Any] = {
        "query_start_loc": part.query_start_loc,
        "key_start_loc": part.key_start_loc,
        "causal": is_causal,
    }
    exact, eager = (
        attend(query, key, value, AttentionOptions(scale=scale), **options)
        for attend in (reference.varlen_attention, eager_varlen_attention)
    )
    report = check_against_reference(output, lse, exact, eager, dtype=layer.dtype)
    assert report.ok, str(report)
    assert output is given
    assert torch.equal(plain, output)
    assert nothing is None
    bounds = {call.arguments["max_seqlen_q"] for call in recorder.of("flash_attn_varlen_func")}
    assert min(bounds) > 1


def test_what_is_offered_first() -> None:
    platform, asked = RocmPlatform(), latent_request()
    assert next(iter(platform.candidates(asked, MI300X))).name == "ROCM_AITER_MLA"
    assert next(iter(platform.mla_prefills(asked, MI300X))).name == "ROCM_AITER_FA"
