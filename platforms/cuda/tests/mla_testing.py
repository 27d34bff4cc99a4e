"""What the tests of backends over latents share: layers, steps, and what is expected of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_cuda._mla_step import LatentStep, kernel_table
from attn_shared import reference
from attn_shared.accuracy import check_against_reference, eager_mla_decode
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.quantization import quantize_fp8
from attn_shared.reference import ReferenceResult
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.spec import LayerSpec

__all__ = ["SMALL", "Decodes", "decodes", "latent_layer", "latent_request"]

SMALL = MLADims(kv_lora_rank=256, qk_nope_head_dim=64)


def latent_request(dims: MLADims | None = None, **fields: Any) -> AttentionRequest:
    dims = dims or MLADims()
    return AttentionRequest(
        **{
            "num_heads": 16,
            "num_kv_heads": 1,
            "head_size": dims.latent_size,
            "mla": dims,
            "block_size": 64,
            **fields,
        }
    )


def latent_layer(
    dims: MLADims | None = None,
    *,
    block_size: int = 64,
    kv_cache_dtype: str = "auto",
    **fields: Any,
) -> LayerSpec:
    dims = dims or MLADims()
    dtype = fields.get("dtype", torch.bfloat16)
    cache = MLAAttentionSpec(
        block_size=block_size,
        dtype=dtype if kv_cache_dtype == "auto" else torch.float8_e4m3fn,
        kv_cache_dtype=kv_cache_dtype,
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
            "dtype": dtype,
            "kv_cache_spec": cache,
            "mla": dims,
            **fields,
        }
    )


@dataclass(frozen=True, kw_only=True)
class Decodes:
    """Decodes with their tensors, and the exact answer."""

    layer: LayerSpec
    query: Tensor
    kv_cache: Tensor
    starts: Tensor
    seq_lens: Tensor
    block_table: Tensor
    cache_scale: float = 1.0

    def step(self, page_size: int, *, width_multiple: int = 1) -> LatentStep:
        lens = self.starts.diff()
        assert self.layer.kv_cache_spec is not None
        ratio = self.layer.kv_cache_spec.block_size // page_size
        is_uniform = bool((lens == lens[0]).all())
        return LatentStep(
            query_start_loc=self.starts,
            query_len=int(lens[0]) if is_uniform else 0,
            max_query_len=int(lens.max()),
            seq_lens=self.seq_lens,
            max_seq_len=int(self.seq_lens.max()),
            block_table=kernel_table(self.block_table, ratio, width_multiple=width_multiple),
            num_tokens=int(self.starts[-1]),
        )

    @property
    def _arguments(self) -> dict[str, Any]:
        assert self.layer.mla is not None
        return {
            "scale": self.layer.scale,
            "kv_lora_rank": self.layer.mla.kv_lora_rank,
            "query_start_loc": self.starts,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "cache_scale": self.cache_scale,
        }

    def expected(self) -> ReferenceResult:
        return reference.mla_decode(self.query, self.kv_cache, **self._arguments)

    def problems(self, output: Tensor, lse: Tensor | None = None) -> tuple[str, ...]:
        """Return what is wrong with an answer."""
        is_fp8 = self.kv_cache.dtype is torch.float8_e4m3fn
        compute = self.kv_cache.dtype if is_fp8 else None
        eager = eager_mla_decode(
            self.query, self.kv_cache, compute_dtype=compute, **self._arguments
        )
        return check_against_reference(
            output, lse, self.expected(), eager, dtype=self.layer.dtype
        ).problems


def decodes(
    layer: LayerSpec, query_lens: list[int], seq_lens: list[int], *, cache_scale: float = 1.0
) -> Decodes:
    """Return decodes over blocks in a random order, of which the others hold NaN."""
    cache = layer.kv_cache_spec
    assert isinstance(cache, MLAAttentionSpec)
    size, generator = cache.block_size, torch.Generator().manual_seed(0)
    counts = [-(-length // size) for length in seq_lens]
    blocks = torch.randperm(sum(counts) + 3, generator=generator, dtype=torch.int32)
    entries = torch.randn(len(blocks), size, layer.head_size, generator=generator)
    stored = entries.to(cache.dtype)
    if cache.is_quantized:
        stored = quantize_fp8(entries, cache_scale, cache.dtype)
    unused = blocks[sum(counts) :].long()
    if not cache.is_quantized:
        stored[unused] = torch.nan
    table = torch.full((len(seq_lens), max(counts) + 1), int(unused[0]), dtype=torch.int32)
    first = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = blocks[first : first + count]
        first += count
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    query = torch.randn(int(starts[-1]), layer.num_heads, layer.head_size, generator=generator)
    return Decodes(
        layer=layer,
        query=query.to(layer.dtype),
        kv_cache=stored,
        starts=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        cache_scale=cache_scale,
    )
