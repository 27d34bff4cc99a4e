"""TORCH_SDPA as a prefill over latents: any widths, ragged requests, earlier keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from attn_shared.accuracy import check_against_reference, eager_varlen_attention
from attn_shared.device import PRESETS
from attn_shared.inventory import Inventory
from attn_shared.mla_context import prefix_sums, ragged_part
from attn_shared.mla_prefill import prefill_request
from attn_shared.reference import AttentionOptions, varlen_attention
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.spec import BuildConfig, LayerSpec
from attn_torch.mla_prefills.torch_sdpa import TorchSDPAPrefill

CPU = torch.device("cpu")
WIDTHS = {
    "narrow values": MLADims(
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
    ),
    "wide values": MLADims(kv_lora_rank=16, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=32),
    "deepseek": MLADims(),
}


def request(dims: MLADims, dtype: torch.dtype = torch.float32) -> AttentionRequest:
    return AttentionRequest(
        num_heads=2, num_kv_heads=1, head_size=dims.latent_size, mla=dims, dtype=dtype
    )


def prefill(dims: MLADims, dtype: torch.dtype, **changes: object) -> TorchSDPAPrefill:
    spec = LayerSpec.from_request(request(dims, dtype), scale=0.2)
    return TorchSDPAPrefill(replace(spec, **changes), BuildConfig(), CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("returns_lse", [True, False])
def test_it_equals_the_reference(
    dims: MLADims, dtype: torch.dtype, is_causal: bool, returns_lse: bool
) -> None:
    generator = torch.Generator().manual_seed(4)
    query_lens = [3, 0, 20, 9]
    key_lens = query_lens if is_causal else [17, 0, 1, 30]
    bare = ragged_part(prefix_sums(query_lens), prefix_sums(key_lens), CPU, is_causal=is_causal)
    kernel = prefill(dims, dtype)
    part = replace(bare, plan=kernel.prepare(bare))
    width = dims.qk_nope_head_dim + dims.qk_rope_head_dim

    def draw(rows: int, size: int) -> torch.Tensor:
        return torch.randn(rows, 2, size, generator=generator).to(dtype)

    query, key = draw(part.num_queries, width), draw(part.num_keys, width)
    value = draw(part.num_keys, dims.qk_nope_head_dim + dims.v_head_dim)
    value = value[..., dims.qk_nope_head_dim :]  # as a projection leaves it
    output, lse = kernel.run(query, key, value, part, returns_lse=returns_lse)
    assert (lse is None) != returns_lse
    arguments = (query, key, value, AttentionOptions(scale=0.2))
    options = {
        "query_start_loc": part.query_start_loc_cpu,
        "key_start_loc": part.key_start_loc_cpu,
        "causal": is_causal,
    }
    exact = varlen_attention(*arguments, **options)
    eager = eager_varlen_attention(*arguments, **options)
    report = check_against_reference(output, lse, exact, eager, dtype=dtype)
    assert report.ok, str(report)


def test_a_given_output_is_the_one_that_is_written() -> None:
    dims = WIDTHS["narrow values"]
    kernel = prefill(dims, torch.float32)
    bare = ragged_part(prefix_sums([5]), prefix_sums([5]), CPU, is_causal=True)
    part = replace(bare, plan=kernel.prepare(bare))
    output = torch.full((5, 2, 12), torch.nan)
    states = torch.randn(5, 2, 24), torch.randn(5, 2, 24), torch.randn(5, 2, 12)
    found, lse = kernel.run(*states, part, output=output)
    assert found is output
    assert lse is None
    assert output.isfinite().all()


@pytest.mark.parametrize("preset", ["h200", "mi300x", "b60", "spr"])
def test_it_serves_every_width_and_dtype_on_every_device(preset: str) -> None:
    device = PRESETS[preset]
    capability = TorchSDPAPrefill.capability(device, Inventory())
    for dims, dtype in product(WIDTHS.values(), (torch.float32, torch.bfloat16, torch.float16)):
        asked = prefill_request(request(dims, dtype).with_options(kv_cache_dtype="fp8"))
        assert capability.check(asked, device) == ()
