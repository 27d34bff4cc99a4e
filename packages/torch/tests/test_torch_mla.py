"""TORCH_MLA where its own parts are looked at; the conformance suite holds it to the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_shared.accuracy import check_against_reference, eager_mla_decode
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_metadata import MLAMetadata
from attn_shared.reference import mla_decode
from attn_shared.request import MLADims
from attn_shared.spec import BuildConfig, LayerSpec
from attn_torch.backends.torch_mla import TorchMLAImpl, TorchMLAMetadataBuilder

DIMS = MLADims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)
CPU = torch.device("cpu")
TABLE = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)


class Layer:
    """What an implementation reads of a layer."""

    q_scale = k_scale = v_scale = 1.0
    sinks = alibi_slopes = kv_b_proj = None


def spec(dtype: torch.dtype = torch.float32, **changes: Any) -> LayerSpec:
    cache = MLAAttentionSpec(block_size=4, head_size=24, kv_lora_rank=16, dtype=dtype)
    return LayerSpec(
        num_heads=3,
        num_kv_heads=1,
        head_size=24,
        head_size_v=16,
        **{"scale": 0.3, "dtype": dtype, "kv_cache_spec": cache, "mla": DIMS, **changes},
    )


def batch(query_lens: tuple[int, int] = (2, 1)) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens, seq_lens=(11, 6), block_table=TABLE, block_size=4
    )


def metadata(common: CommonAttentionMetadata, layer: LayerSpec) -> MLAMetadata[Any]:
    config = BuildConfig(mla_workspace_bytes=1)
    return TorchMLAMetadataBuilder(layer.kv_cache_spec, {"x": layer}, config, CPU).build(0, common)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_decodes_equal_the_reference_whatever_the_sign_of_the_scale(
    dtype: torch.dtype, scale: float
) -> None:
    generator = torch.Generator().manual_seed(2)
    layer, common = spec(dtype, scale=scale), batch()
    query = torch.randn(3, 3, 24, generator=generator).to(dtype)
    cache = torch.randn(6, 4, 24, generator=generator).to(dtype)
    lse = torch.empty(3, 3)
    found = TorchMLAImpl(layer).forward_mqa(Layer(), query, cache, metadata(common, layer), lse=lse)
    call = {
        "scale": scale,
        "kv_lora_rank": 16,
        "query_start_loc": common.query_start_loc,
        "seq_lens": common.seq_lens,
        "block_table": TABLE,
    }
    exact, eager = mla_decode(query, cache, **call), eager_mla_decode(query, cache, **call)
    report = check_against_reference(found, lse, exact, eager, dtype=dtype)
    assert report.ok, str(report)


def test_ieee_float32_where_the_process_lets_products_be_rounded() -> None:
    layer, common = spec(), batch()
    query, cache = torch.randn(3, 3, 24), torch.randn(6, 4, 24)
    call = (Layer(), query, cache, metadata(common, layer))
    expected = TorchMLAImpl(layer).forward_mqa(*call)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        found = TorchMLAImpl(layer).forward_mqa(*call)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_rows_behind_the_decodes_are_not_read() -> None:
    layer, common = spec(), batch()
    query, cache = torch.randn(5, 3, 24), torch.randn(6, 4, 24)
    query[3:] = torch.nan
    found = TorchMLAImpl(layer).forward_mqa(Layer(), query, cache, metadata(common, layer))
    assert found.shape == (5, 3, 16)
    assert found[:3].isfinite().all()
    assert not found[3:].any()


def test_metadata_of_another_backend_is_refused() -> None:
    layer = spec()
    other = MLAMetadata(num_tokens=1, num_decode_tokens=1, num_decodes=1, decode=object())
    with pytest.raises(InvalidInputError, match=r"metadata.decode is object; allowed: a Torch"):
        TorchMLAImpl(layer).forward_mqa(
            Layer(), torch.zeros(1, 3, 24), torch.zeros(6, 4, 24), other
        )


def test_a_layer_of_ordinary_heads_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="mla=False"):
        TorchMLAImpl(replace(spec(), mla=None, head_size_v=24))


def test_lengths_that_only_the_device_knows_are_refused() -> None:
    layer = spec()
    with pytest.raises(InvalidInputError, match="seq_lens_cpu"):
        metadata(batch().with_fields(seq_lens_cpu=None), layer)
