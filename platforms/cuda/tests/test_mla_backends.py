from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mla_backends import BACKENDS, Stubbed, built, common_of, decodes_for, loaded
from mla_testing import decodes, latent_layer, latent_request

from attn_shared.backend import AttentionCGSupport
from attn_shared.capability import Capability
from attn_shared.errors import (
    InvalidInputError,
    InvalidRequestError,
    MLAForwardError,
    UnsupportedOptionError,
    VendorMissingError,
)
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.mla_metadata import MLAMetadata
from attn_shared.request import AttentionRequest, MLADims

EACH = pytest.mark.parametrize("name", BACKENDS)


def layer_object(**values: Any) -> Any:
    plain = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "sinks": None, "alibi_slopes": None}
    return SimpleNamespace(**{**plain, **values})


def capability_of(name: str, device: str | None = None) -> tuple[Capability, Any]:
    with loaded(BACKENDS[name], device) as (_, subject):
        return subject.capability, subject.facts


@EACH
@pytest.mark.parametrize("num_heads", [8, 16])
def test_decodes_with_and_without_lse_and_output(name: str, num_heads: int) -> None:
    stubbed = BACKENDS[name]
    given = decodes_for(stubbed, [1, 130, 0, 64], num_heads=num_heads)
    with loaded(stubbed) as (recorder, _):
        impl, builder = built(stubbed.backend, given.layer)
        metadata = builder.build(0, common_of(given))
        lse = torch.full((num_heads, 4), torch.nan)
        output = torch.full((4, num_heads, 512), torch.nan, dtype=torch.bfloat16)
        result = impl.forward_mqa(
            layer_object(), given.query, given.kv_cache, metadata, output, lse=lse
        )
        assert result is output
        assert given.problems(output, lse) == ()
        fresh = impl.forward_mqa(layer_object(), given.query, given.kv_cache, metadata)
    assert torch.equal(fresh, output)
    assert all(not call.positional for call in recorder.calls if "Wrapper" not in call.function)


@EACH
def test_drafts_as_long_as_the_kernel_takes(name: str) -> None:
    stubbed = BACKENDS[name]
    given = decodes_for(stubbed, [5, 130, 64], stubbed.query_len)
    with loaded(stubbed):
        impl, builder = built(stubbed.backend, given.layer, num_spec_tokens=2)
        metadata = builder.build(0, common_of(given))
        assert metadata.num_decode_tokens == len(given.query)
        lse = torch.empty(16, len(given.query))
        output = impl.forward_mqa(layer_object(), given.query, given.kv_cache, metadata, lse=lse)
    assert given.problems(output, lse) == ()


@EACH
def test_decodes_before_prefills(name: str) -> None:
    stubbed = BACKENDS[name]
    layer = latent_layer(block_size=stubbed.block_size)
    threshold = 600  # longer than any decode
    given = decodes(layer, [1, 1, threshold], [70, 5, threshold])
    with loaded(stubbed):
        impl, builder = built(stubbed.backend, layer)
        metadata = builder.build(0, common_of(given))
        assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 2)
        output = torch.full((len(given.query), 16, 512), 7.0, dtype=torch.bfloat16)
        impl.forward_mqa(layer_object(), given.query, given.kv_cache, metadata, output)
    first = replace(
        given,
        query=given.query[:2],
        starts=given.starts[:3],
        seq_lens=given.seq_lens[:2],
        block_table=given.block_table[:2],
    )
    assert first.problems(output[:2]) == ()
    assert bool((output[2:] == 7.0).all())


@EACH
def test_a_batch_without_decodes_runs_nothing(name: str) -> None:
    stubbed = BACKENDS[name]
    layer = latent_layer(block_size=stubbed.block_size)
    given = decodes(layer, [600], [600])
    with loaded(stubbed) as (recorder, _):
        impl, builder = built(stubbed.backend, layer)
        before = len(recorder.calls)
        metadata = builder.build(0, common_of(given))
        output = impl.forward_mqa(layer_object(), given.query, given.kv_cache, metadata)
        assert len(recorder.calls) == before
    assert output.shape == (600, 16, 512)


@EACH
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_captured_step_reads_later_batches_at_its_addresses(name: str, query_len: int) -> None:
    stubbed = BACKENDS[name]
    query_len = min(query_len, stubbed.query_len)
    given = decodes_for(stubbed, [60, 130, 200], query_len)
    tokens = len(given.query)
    with loaded(stubbed):
        impl, builder = built(
            stubbed.backend, given.layer, capture_sizes=(tokens,), num_spec_tokens=2
        )
        common = common_of(given)
        metadata = builder.build_for_cudagraph_capture(common)
        lse = torch.empty(16, tokens)
        arguments = (layer_object(), given.query, given.kv_cache, metadata)
        impl.forward_mqa(*arguments, lse=lse)
        for lens in ([61, 3, 199], [0, 64, 8]):
            given.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
            builder.build(0, common_of(given))
            output = impl.forward_mqa(*arguments, lse=lse)
            assert given.problems(output, lse) == ()


@EACH
def test_plans_of_two_steps_hold_side_by_side(name: str) -> None:
    stubbed = BACKENDS[name]
    first, second = (decodes_for(stubbed, lens) for lens in ([5, 70], [130, 1]))
    with loaded(stubbed):
        impl, builder = built(stubbed.backend, first.layer)
        steps = [(given, builder.build(0, common_of(given))) for given in (first, second)]
        for given, metadata in (*steps, *reversed(steps)):
            output = impl.forward_mqa(layer_object(), given.query, given.kv_cache, metadata)
            assert given.problems(output) == ()


@EACH
def test_bounds_of_lengths_are_enough_where_kernels_read_them(name: str) -> None:
    stubbed = BACKENDS[name]
    given = decodes_for(stubbed, [5, 130])
    common = common_of(given, seq_lens_cpu_is_exact=False).with_fields(
        seq_lens_cpu=given.seq_lens + 9, max_seq_len=139
    )
    with loaded(stubbed) as (_, subject):
        impl, builder = built(stubbed.backend, given.layer)
        if subject.capability.needs_exact_host_lengths:
            with pytest.raises(Exception, match="exact"):
                builder.build(0, common)
            return
        metadata = builder.build(0, common)
        output = impl.forward_mqa(layer_object(), given.query, given.kv_cache, metadata)
    assert given.problems(output) == ()


@EACH
def test_strided_rows_and_padding_behind_the_decodes(name: str) -> None:
    stubbed = BACKENDS[name]
    given = decodes_for(stubbed, [5, 130])
    wide = torch.full((4, 16, 600), torch.nan, dtype=torch.bfloat16)
    wide[:2, :, 8:584] = given.query
    with loaded(stubbed):
        impl, builder = built(stubbed.backend, given.layer)
        metadata = builder.build(0, common_of(given))
        lse = torch.full((16, 4), 3.0)
        output = impl.forward_mqa(
            layer_object(), wide[..., 8:584], given.kv_cache, metadata, lse=lse
        )
    assert output.shape == (4, 16, 512)
    assert given.problems(output[:2], lse[:, :2]) == ()
    assert bool((lse[:, 2:] == 3.0).all())


LEVELS = {
    "flashmla-tokenspeed": AttentionCGSupport.UNIFORM_BATCH,
    "flash-attn-vllm": AttentionCGSupport.UNIFORM_BATCH,
    "flashinfer-0.6-hopper": AttentionCGSupport.UNIFORM_BATCH,
    "flashinfer-0.6-blackwell": AttentionCGSupport.UNIFORM_BATCH,
    "cutlass": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
}
THRESHOLDS = {
    "flashmla-tokenspeed": (128, 128),
    "flash-attn-vllm": (512, 512),
    "flashinfer-0.6-hopper": (1, 4),
    "flashinfer-0.6-blackwell": (1, 4),
    "cutlass": (1, 1),
}


@pytest.mark.parametrize("name", LEVELS)
def test_levels_and_thresholds(name: str) -> None:
    stubbed = BACKENDS[name]
    layer = latent_layer(block_size=stubbed.block_size)
    with loaded(stubbed):
        found = [built(stubbed.backend, layer, num_spec_tokens=drafts)[1] for drafts in (0, 3)]
        level = found[0].get_cudagraph_support(found[0].config, layer.kv_cache_spec)
    assert level is LEVELS[name]
    assert tuple(builder.reorder_batch_threshold for builder in found) == THRESHOLDS[name]


# Bad input


@EACH
def test_there_is_no_forward(name: str) -> None:
    stubbed = BACKENDS[name]
    with loaded(stubbed):
        impl, _ = built(stubbed.backend, latent_layer(block_size=stubbed.block_size))
    assert not hasattr(impl, "forward")
    with pytest.raises(MLAForwardError, match="call forward_mha for prefill"):
        getattr(impl, "forward")  # noqa: B009


def test_value_heads_that_are_not_the_latent() -> None:
    with pytest.raises(InvalidRequestError, match="head_size_v=128 is not allowed; allowed: 512 "):
        latent_request(head_size_v=128)


@pytest.mark.parametrize("block_size", [16, 32, 96])
def test_blocks_of_sixteen_on_flashmla(block_size: int) -> None:
    capability, device = capability_of("flashmla-tokenspeed")
    reasons = capability.check(latent_request(block_size=block_size), device)
    assert [(r.code, r.value, r.allowed) for r in reasons] == [
        ("block_size", str(block_size), "a multiple of 64")
    ]
    with (
        loaded(BACKENDS["flashmla-tokenspeed"]),
        pytest.raises(
            UnsupportedOptionError, match=f"block_size={block_size} .allowed: a multiple"
        ),
    ):
        built(BACKENDS["flashmla-tokenspeed"].backend, latent_layer(block_size=block_size))


@EACH
def test_a_packed_cache_is_refused_by_who_does_not_read_it(name: str) -> None:
    capability, device = capability_of(name)
    request = latent_request(block_size=BACKENDS[name].block_size, kv_cache_dtype="fp8_ds_mla")
    reasons = capability.check(request, device)
    assert [(r.code, r.value) for r in reasons] == [("kv_cache_dtype", "fp8_ds_mla")]
    assert "auto" in reasons[0].allowed


@EACH
def test_blocks_at_addresses_that_kernels_cannot_load_from(name: str) -> None:
    stubbed = BACKENDS[name]
    layer = latent_layer(block_size=stubbed.block_size)
    cache = layer.kv_cache_spec
    assert isinstance(cache, MLAAttentionSpec)
    padded = replace(cache, page_size_padded=cache.page_size_bytes + 6)
    given = decodes(layer, [1], [5])
    with loaded(stubbed):
        with pytest.raises(UnsupportedOptionError, match="allowed: a multiple of 16 bytes"):
            stubbed.backend.get_impl_cls()(replace(layer, kv_cache_spec=padded))
        impl, builder = built(stubbed.backend, layer)
        memory = torch.empty(given.kv_cache.numel() + 1, dtype=layer.dtype)
        odd = memory[1:].view(given.kv_cache.shape)
        with pytest.raises(UnsupportedOptionError, match="do not all begin at a multiple of 16"):
            impl.forward_mqa(layer_object(), given.query, odd, builder.build(0, common_of(given)))


def test_more_heads_than_cutlass_has() -> None:
    capability, device = capability_of("cutlass")
    (reason,) = capability.check(latent_request(num_heads=256, block_size=128), device)
    assert (reason.code, reason.value) == ("num_heads", "256")
    assert reason.allowed.startswith("at most 128")


@pytest.mark.parametrize("name", ["flashmla-tokenspeed", "flashinfer-0.6-hopper", "cutlass"])
def test_latents_of_other_widths(name: str) -> None:
    capability, device = capability_of(name)
    size = BACKENDS[name].block_size
    small = MLADims(kv_lora_rank=256, qk_rope_head_dim=64)
    (reason,) = capability.check(latent_request(small, block_size=size), device)
    assert (reason.code, reason.value, reason.allowed) == ("head_size", "320", "576")
    odd = MLADims(kv_lora_rank=448, qk_rope_head_dim=128)
    (reason,) = capability.check(latent_request(odd, block_size=size), device)
    assert reason.code == "mla_dims"
    assert reason.value == "kv_lora_rank=448 with qk_rope_head_dim=128"
    assert reason.allowed == "512 with 64"


def test_a_width_without_rope_that_trtllm_does_not_know() -> None:
    capability, device = capability_of("flashinfer-0.6-blackwell")
    dims = MLADims(qk_nope_head_dim=96)
    (reason,) = capability.check(latent_request(dims, block_size=32), device)
    assert (reason.value, reason.allowed) == ("qk_nope_head_dim=96", "64, 128, 192")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("flashmla-tokenspeed", "b200"),
        ("flash-attn-vllm", "b200"),
        ("flashinfer-0.6-hopper", "a100"),
        ("cutlass", "h200"),
    ],
)
def test_devices_that_a_kernel_is_not_for(name: str, device: str) -> None:
    capability, facts = capability_of(name, device)
    reasons = capability.check(latent_request(block_size=BACKENDS[name].block_size), facts)
    assert "device" in {reason.code for reason in reasons}


def test_ordinary_heads_are_not_latents() -> None:
    capability, device = capability_of("flash-attn-vllm")
    request = AttentionRequest(num_heads=8, num_kv_heads=8, head_size=576, block_size=16)
    assert "mla" in {reason.code for reason in capability.check(request, device)}


@EACH
def test_metadata_of_another_backend(name: str) -> None:
    stubbed = BACKENDS[name]
    given = decodes_for(stubbed, [5])
    foreign: Any = MLAMetadata(num_tokens=1, num_decode_tokens=1, num_decodes=1, decode=object())
    with loaded(stubbed):
        impl, _ = built(stubbed.backend, given.layer)
        with pytest.raises(InvalidInputError, match="which the builder of this layer's backend"):
            impl.forward_mqa(layer_object(), given.query, given.kv_cache, foreign)


@EACH
def test_nothing_is_built_before_the_library_is_loaded(name: str) -> None:
    stubbed: Stubbed = BACKENDS[name]
    with loaded(stubbed):
        pass
    with pytest.raises(VendorMissingError, match="is not loaded in this process"):
        stubbed.backend.get_impl_cls()(latent_layer(block_size=stubbed.block_size))


FP8 = ("flashmla-sgl", "flashinfer-0.6-blackwell", "flashinfer-0.7-blackwell")


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.25)])
def test_an_fp8_cache(name: str, scale: float | torch.Tensor) -> None:
    stubbed = BACKENDS[name]
    layer = latent_layer(block_size=stubbed.block_size, kv_cache_dtype="fp8")
    given = decodes(layer, [1, 1, 1], [5, 130, 64], cache_scale=float(scale))
    owner = layer_object(k_scale=scale, v_scale=scale)
    with loaded(stubbed):
        impl, builder = built(stubbed.backend, layer)
        metadata = builder.build(0, common_of(given))
        lse = torch.empty(16, 3)
        output = impl.forward_mqa(owner, given.query, given.kv_cache, metadata, lse=lse)
    assert given.problems(output, lse) == ()


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in FP8])
def test_who_reads_no_fp8_cache(name: str) -> None:
    capability, device = capability_of(name)
    request = latent_request(block_size=BACKENDS[name].block_size, kv_cache_dtype="fp8")
    assert [r.code for r in capability.check(request, device)] == ["kv_cache_dtype"]


DECODES_BY = {
    "flashmla-tokenspeed": ("the dense kernels of", "128 query tokens, all of one length"),
    "flashmla-sgl": ("use_legacy", "no dense decode here"),
    "flash-attn-vllm": ("FlashAttention 3 of vllm_flash_attn_3", "up to 512 query tokens"),
    "flash-attn-upstream": ("FlashAttention 3 of flash_attn_3", "no schedule made ahead"),
    "flashinfer-0.6-hopper": ('"fa3"', "planned on the host for sm_90"),
    "flashinfer-0.7-hopper": ('"fa3"', "planned on the host for sm_90"),
    "flashinfer-0.6-blackwell": ("trtllm-gen's kernels", "no plan is made"),
    "flashinfer-0.7-blackwell": ("trtllm-gen's kernels", "all of one length"),
    "cutlass": ("sm100_cutlass_mla_decode", "16 heads, padded to the kernel's 128"),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_it_says_what_decodes(name: str) -> None:
    stubbed = BACKENDS[name]
    with loaded(stubbed) as (_, subject):
        request = latent_request(block_size=stubbed.block_size)
        (path,) = stubbed.backend.kernel_paths(request, subject.facts, subject.inventory)
    kernel, why = DECODES_BY[name]
    assert path.rows == "decodes"
    assert kernel in path.kernel
    assert why in path.why


@pytest.mark.parametrize("name", ["flashmla-sgl", "flashinfer-0.7-blackwell"])
def test_it_says_that_products_are_of_fp8(name: str) -> None:
    stubbed = BACKENDS[name]
    with loaded(stubbed) as (_, subject):
        request = latent_request(block_size=stubbed.block_size, kv_cache_dtype="fp8")
        (path,) = stubbed.backend.kernel_paths(request, subject.facts, subject.inventory)
    assert "multiplied as fp8" in path.why
