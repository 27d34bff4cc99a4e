from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fa_testing import STUBS as FLASH_ATTN_STUBS
from mla_testing import latent_layer, latent_request

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.vendors.flashinfer_mla import FLASHINFER_MLA_0_6, FLASHINFER_MLA_0_7
from attn_cuda.mla_prefills import flash_attn
from attn_cuda.mla_prefills.flash_attn import FlashAttnPrefill
from attn_cuda.mla_prefills.flashinfer import FlashInferPrefill
from attn_cuda.mla_prefills.trtllm_ragged import TrtllmRaggedPrefill
from attn_cuda.platform import CudaPlatform
from attn_cuda.priorities import MLA_PREFILL_PRIORITIES
from attn_shared import reference
from attn_shared.accuracy import check_against_reference, eager_varlen_attention
from attn_shared.device import preset
from attn_shared.errors import VendorMissingError
from attn_shared.inventory import Inventory, probe, scan
from attn_shared.mla_context import ragged_part
from attn_shared.mla_prefill import MLAPrefill, prefill_request
from attn_shared.ranking import rank
from attn_shared.reference import AttentionOptions
from attn_shared.request import MLADims
from attn_shared.spec import BuildConfig, LayerSpec

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Stubbed:
    cls: type[MLAPrefill]
    stub: VendorStub
    device: str = "h200"


PREFILLS = {
    "fa3-vllm": Stubbed(cls=FlashAttnPrefill, stub=FLASH_ATTN_STUBS["vllm_flash_attn_3"]),
    "fa3-padded": Stubbed(cls=FlashAttnPrefill, stub=FLASH_ATTN_STUBS["flash_attn_3"]),
    "fa4": Stubbed(cls=FlashAttnPrefill, stub=FLASH_ATTN_STUBS["flash_attn_4"], device="b200"),
    "fa2-padded": Stubbed(cls=FlashAttnPrefill, stub=FLASH_ATTN_STUBS["flash_attn"], device="a100"),
    "flashinfer-0.6": Stubbed(cls=FlashInferPrefill, stub=FLASHINFER_MLA_0_6, device="b200"),
    "flashinfer-0.7": Stubbed(cls=FlashInferPrefill, stub=FLASHINFER_MLA_0_7, device="b200"),
    "trtllm": Stubbed(cls=TrtllmRaggedPrefill, stub=FLASHINFER_MLA_0_6, device="b200"),
}
PADDED = ("fa3-padded", "fa2-padded")


@contextmanager
def loaded(stubbed: Stubbed) -> Iterator[tuple[Recorder, Inventory]]:
    flash_attn.DEVICES.forget()
    try:
        with stub_vendor(stubbed.stub) as recorder:
            specs, device = CudaPlatform().vendor_specs(), preset(stubbed.device)
            names = [s.name for s in specs if s.name in stubbed.cls.vendor_libraries]
            inventory = probe(specs, names, scan(specs))
            stubbed.cls.load_vendor(device, inventory)
            yield recorder, inventory
    finally:
        flash_attn.DEVICES.forget()


def part_of(query_lens: list[int], key_lens: list[int], *, is_causal: bool) -> Any:
    starts = [
        torch.tensor([0, *lens], dtype=torch.int32).cumsum(0) for lens in (query_lens, key_lens)
    ]
    first, second = (each.int() for each in starts)
    return ragged_part(first, second, CPU, is_causal=is_causal)


def heads(layer: LayerSpec, part: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dims, generator = layer.mla, torch.Generator().manual_seed(3)
    assert dims is not None
    width = dims.qk_nope_head_dim + dims.qk_rope_head_dim

    def draw(rows: int, size: int) -> torch.Tensor:
        return torch.randn(rows, layer.num_heads, size, generator=generator).to(layer.dtype)

    value = draw(part.num_keys, dims.qk_nope_head_dim + dims.v_head_dim)
    value = value[..., dims.qk_nope_head_dim :]  # a view, as the projection leaves it
    return draw(part.num_queries, width), draw(part.num_keys, width), value


@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("scale", [0.07, -0.05])
@pytest.mark.parametrize(
    ("query_lens", "key_lens", "is_causal"),
    [([5, 33, 1], [5, 33, 1], True), ([3, 0, 2], [40, 0, 9], False)],
)
def test_parts_of_a_step(
    name: str, scale: float, query_lens: list[int], key_lens: list[int], is_causal: bool
) -> None:
    stubbed = PREFILLS[name]
    layer = latent_layer(num_heads=4, scale=scale)
    part = part_of(query_lens, key_lens, is_causal=is_causal)
    query, key, value = heads(layer, part)
    with loaded(stubbed) as (recorder, _):
        kernel = stubbed.cls(layer, BuildConfig(), CPU)
        part = replace(part, plan=kernel.prepare(part))
        given = torch.full((len(query), 4, 128), torch.nan, dtype=layer.dtype)
        output, lse = kernel.run(query, key, value, part, output=given, returns_lse=True)
        plain, nothing = kernel.run(query, key, value, part)
    options: dict[str, Any] = {
        "query_start_loc": part.query_start_loc,
        "key_start_loc": part.key_start_loc,
        "causal": is_causal,
    }
    plain_options = AttentionOptions(scale=scale)
    exact = reference.varlen_attention(query, key, value, plain_options, **options)
    eager = eager_varlen_attention(query, key, value, plain_options, **options)
    report = check_against_reference(output, lse, exact, eager, dtype=layer.dtype)
    assert report.ok, str(report)
    assert torch.equal(plain, output)
    assert nothing is None
    assert len(recorder.calls) > 1


@pytest.mark.parametrize("name", PREFILLS)
def test_values_are_padded_where_the_kernel_has_one_width(name: str) -> None:
    stubbed = PREFILLS[name]
    layer = latent_layer(num_heads=2)
    part = part_of([4], [4], is_causal=True)
    tensors = heads(layer, part)
    with loaded(stubbed) as (recorder, _):
        kernel = stubbed.cls(layer, BuildConfig(), CPU)
        kernel.run(*tensors, replace(part, plan=kernel.prepare(part)))
    last = recorder.calls[-1].arguments
    value = last.get("v", last.get("value"))
    assert value.shape[-1] == (192 if name in PADDED else 128)


def test_batch_invariant_mode_splits_nothing_and_keeps_its_tiles() -> None:
    layer = latent_layer(num_heads=2, batch_invariant=True)
    part = part_of([1], [1], is_causal=True)
    with loaded(PREFILLS["fa3-vllm"]):
        plan = FlashAttnPrefill(layer, BuildConfig(), CPU).prepare(part)
    assert (plan.num_splits, plan.max_query_len) == (1, 2)


@pytest.mark.parametrize("name", ["flashinfer-0.6", "trtllm"])
def test_widths_that_a_kernel_has_not(name: str) -> None:
    stubbed = PREFILLS[name]
    with loaded(stubbed) as (_, inventory):
        capability = stubbed.cls.capability(preset("b200"), inventory)
    asked = prefill_request(latent_request(MLADims(qk_nope_head_dim=96)))
    (reason,) = capability.check(asked, preset("b200"))
    assert (reason.code, reason.value) == ("mla_dims", "96 64 128")
    assert reason.allowed.startswith("128 64 128")
    glm = prefill_request(latent_request(MLADims(qk_nope_head_dim=192, v_head_dim=256)))
    assert bool(capability.check(glm, preset("b200"))) is (name != "trtllm")
    assert "device" in {r.code for r in capability.check(asked, preset("h200"))}


def test_values_wider_than_keys_cannot_be_padded() -> None:
    with loaded(PREFILLS["fa2-padded"]) as (_, inventory):
        capability = FlashAttnPrefill.capability(preset("a100"), inventory)
    dims = MLADims(qk_nope_head_dim=64, v_head_dim=256)
    (reason,) = capability.check(prefill_request(latent_request(dims)), preset("a100"))
    assert (reason.code, reason.value) == ("head_size_v", "256")
    assert reason.allowed == "flash_attn: 128, as head_size"


def test_nothing_is_built_before_the_library_is_loaded() -> None:
    flash_attn.DEVICES.forget()
    with pytest.raises(VendorMissingError, match="mla_prefill FLASH_ATTN is not loaded"):
        FlashAttnPrefill(latent_layer(), BuildConfig(), CPU)


PREFILLED_BY = {
    "fa3-vllm": ("FlashAttention 3 of vllm_flash_attn_3", "heads of 192 with values of 128"),
    "fa3-padded": ("FlashAttention 3 of flash_attn_3", "padded to 192"),
    "fa4": ("FlashAttention 4", "values of 128"),
    "fa2-padded": ("FlashAttention 2", "padded to 192"),
    "flashinfer-0.6": ('ragged kernel "cutlass"', "planned on the host"),
    "flashinfer-0.7": ('ragged kernel "cutlass"', "planned on the host"),
    "trtllm": ("trtllm_ragged_attention_deepseek", "read on the device"),
}


@pytest.mark.parametrize("name", PREFILLS)
def test_it_says_what_prefills(name: str) -> None:
    stubbed = PREFILLS[name]
    with loaded(stubbed) as (_, inventory):
        asked = prefill_request(latent_request())
        (path,) = stubbed.cls.kernel_paths(asked, preset(stubbed.device), inventory)
    kernel, why = PREFILLED_BY[name]
    assert path.rows == "prefills"
    assert kernel in path.kernel
    assert why in path.why


def test_a_device_that_is_not_for_it_is_the_one_reason() -> None:
    capability = FlashAttnPrefill.capability(preset("genericcpu"), Inventory())
    reasons = capability.check(prefill_request(latent_request()), preset("genericcpu"))
    assert [reason.code for reason in reasons] == ["device"]


@pytest.mark.parametrize(
    ("fields", "is_ahead"),
    [({}, True), ({"dtype": torch.float32}, False), ({"mla": MLADims(v_head_dim=192)}, False)],
)
def test_triton_prefills_deepseeks_widths_before_torch_on_hopper(
    fields: dict[str, Any], is_ahead: bool
) -> None:
    asked = prefill_request(latent_request(**{"dtype": torch.bfloat16, **fields}))
    order = [each.name for each in rank(MLA_PREFILL_PRIORITIES, asked, preset("h200"))]
    assert (order.index("TRITON") < order.index("TORCH_SDPA")) is is_ahead
