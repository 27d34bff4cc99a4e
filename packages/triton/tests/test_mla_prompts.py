"""Which kernel prefills latents, and the one for Hopper beside the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_shared import reference
from attn_shared.accuracy import check_against_reference, eager_varlen_attention
from attn_shared.arch import parse_arch
from attn_shared.device import preset
from attn_shared.inventory import Inventory
from attn_shared.mla_context import ragged_part
from attn_shared.mla_metadata import RaggedPart
from attn_shared.mla_prefill import prefill_request
from attn_shared.reference import AttentionOptions
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.spec import BuildConfig, LayerSpec
from attn_triton.mla_prefills.triton import TritonPrefill
from attn_triton.mla_prompt_tiles import plain_because

DIMS = MLADims()
HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("arch", "dims", "dtype", "has_gluon", "why"),
    [
        ("sm_90", DIMS, HALF, True, None),
        ("sm_90", DIMS, torch.float16, True, None),
        ("sm_90", DIMS, HALF, False, "no Gluon"),
        ("sm_90", DIMS, torch.float32, True, "float32"),
        ("sm_90", MLADims(qk_nope_head_dim=64), HALF, True, r"widths 64 64 128"),
        ("sm_90", MLADims(v_head_dim=192), HALF, True, r"widths 128 64 192"),
        ("sm_100", DIMS, HALF, True, "this is sm_100"),
        ("gfx942", DIMS, HALF, True, "this is gfx942"),
    ],
)
def test_which_kernel_prefills(
    arch: str, dims: MLADims, dtype: torch.dtype, has_gluon: bool, why: str | None
) -> None:
    found = plain_because(parse_arch(arch), dims, dtype, has_gluon=has_gluon)
    assert (found is None) if why is None else (found is not None and why in found)


@pytest.mark.parametrize(
    ("device", "kernel", "why"),
    [("h200", "for Hopper, in Gluon", "128, 64 and 128"), ("b200", "portable", "this is sm_100")],
)
def test_it_says_which_kernel_prefills(device: str, kernel: str, why: str) -> None:
    request = prefill_request(
        AttentionRequest(
            num_heads=16, num_kv_heads=1, head_size=DIMS.latent_size, mla=DIMS, dtype=HALF
        )
    )
    (path,) = TritonPrefill.kernel_paths(request, preset(device), Inventory())
    assert kernel in path.kernel
    assert why in path.why


def part_of(query_lens: Sequence[int], key_lens: Sequence[int], *, is_causal: bool) -> RaggedPart:
    starts = [
        torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()
        for lens in (query_lens, key_lens)
    ]
    return ragged_part(*starts, torch.device("cuda"), is_causal=is_causal)


def layer_of(num_heads: int, dtype: torch.dtype, scale: float) -> LayerSpec:
    return LayerSpec(
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=DIMS.latent_size,
        head_size_v=DIMS.kv_lora_rank,
        scale=scale,
        dtype=dtype,
        mla=DIMS,
    )


class Inputs:
    """Queries, what the projection leaves, and rope parts."""

    def __init__(self, part: RaggedPart, num_heads: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device="cuda", dtype=dtype)

        self.query = draw(part.num_queries, num_heads, 192)
        self.up, self.rope = draw(part.num_keys, num_heads, 256), draw(part.num_keys, 64)

    @property
    def apart(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.up[..., :128], self.rope, self.up[..., 128:]

    @property
    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        query, nope, rope, value = self.apart
        wide = rope.unsqueeze(1).expand(-1, nope.shape[1], -1)
        return query, torch.cat((nope, wide), dim=2), value


BATCHES: dict[str, dict[str, Any]] = {
    "one tile": {"query_lens": [128], "key_lens": [128]},
    "ragged": {"query_lens": [300, 1, 129, 77], "key_lens": [300, 1, 129, 77]},
    "long": {"query_lens": [1500], "key_lens": [1500]},
    "longer keys": {"query_lens": [200, 130], "key_lens": [1000, 513]},
    "earlier keys": {"query_lens": [5, 256], "key_lens": [700, 90], "is_causal": False},
    "more rows than keys": {"query_lens": [40, 3], "key_lens": [30, 1]},
    "many": {"query_lens": [7] * 60, "key_lens": [9] * 60},
}


@pytest.mark.cuda(min_capability=(9, 0))
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [192**-0.5, -0.05])
def test_it_attends(batch: dict[str, Any], dtype: torch.dtype, scale: float) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    part = part_of(**{"is_causal": True, **batch})
    spec = layer_of(6, dtype, scale)
    prefill = TritonPrefill(spec, BuildConfig(), torch.device("cuda"))
    assert prefill._hopper is not None
    part = replace(part, plan=prefill.prepare(part))
    given = Inputs(part, 6, dtype)
    output, lse = prefill.run_apart(*given.apart, part, returns_lse=True)
    into = torch.full((part.num_queries, 6, 136), torch.nan, dtype=dtype, device="cuda")
    again, nothing = prefill.run(*given.whole, part, output=into[..., :128])
    assert torch.equal(again, output)
    assert nothing is None
    assert into[..., 128:].isnan().all()
    query, key, value = (each.cpu() for each in given.whole)
    options: dict[str, Any] = {
        "query_start_loc": part.query_start_loc_cpu,
        "key_start_loc": part.key_start_loc_cpu,
        "causal": part.is_causal,
    }
    plain = AttentionOptions(scale=scale)
    exact = reference.varlen_attention(query, key, value, plain, **options)
    eager = eager_varlen_attention(query, key, value, plain, **options)
    assert lse is not None
    report = check_against_reference(output.cpu(), lse.cpu(), exact, eager, dtype=dtype)
    assert report.ok, str(report)


@pytest.mark.cuda(min_capability=(9, 0))
def test_a_request_never_reads_another() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    part = part_of([100, 60], [100, 60], is_causal=True)
    prefill = TritonPrefill(layer_of(2, HALF, 0.07), BuildConfig(), torch.device("cuda"))
    part = replace(part, plan=prefill.prepare(part))
    given = Inputs(part, 2, HALF)
    clean, _ = prefill.run_apart(*given.apart, part)
    for each in (given.query, given.up, given.rope):
        each[100:] = torch.nan
    found, _ = prefill.run_apart(*given.apart, part)
    assert torch.equal(found[:100], clean[:100])
    assert found[100:].isnan().all()
