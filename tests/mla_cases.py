"""Batches over latents with their exact answers, for tests of layers and backends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_shared.accuracy import AccuracyReport, check_against_reference
from attn_shared.kv_write import concat_and_cache_mla, slot_mapping_for
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla import MLAAttention
from attn_shared.mla_reference import eager_mla_attention, mla_attention
from attn_shared.reference import ReferenceResult
from attn_shared.request import MLADims

DIMS = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
HEADS, BLOCK, SCALE = 3, 4, 0.21


@dataclass(kw_only=True)
class Case:
    """A step: its batch, tensors, and a cache that holds the earlier tokens."""

    attn: MLAAttention
    common: CommonAttentionMetadata
    query: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    kv_cache: torch.Tensor

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and LSE of the layer."""
        plan = self.attn.plan(self.common)
        lse = torch.full((self.query.shape[1], len(self.query)), 7.0)
        output = self.attn.forward(
            self.query, self.latent, self.rope, self.kv_cache, plan, lse=lse, **options
        )
        return output, lse

    def report(self, output: torch.Tensor, lse: torch.Tensor | None) -> AccuracyReport:
        """Hold an answer to the expanded computation in float64; the cache is written by now.

        Narrow dtypes are held to a budget for each request as well: a fresh prompt's first rows
        average few values, and what they may err in bfloat16 would excuse a long context's rows
        being a third too small. In float32 the whole call's budget finds that, while the yardstick
        of one short row is as noisy as what it measures.
        """
        attn, common = self.attn, self.common
        assert attn.kv_b_proj is not None
        assert attn.request.mla is not None
        arguments = (self.query, self.kv_cache, attn.kv_b_proj, attn.request.mla)
        batch: dict[str, Any] = {
            "scale": attn.spec.scale,
            "query_start_loc": common.query_start_loc,
            "seq_lens": common.seq_lens,
            "block_table": common.block_table,
            "causal": common.causal,
            "cache_scale": attn.k_scale,
        }
        exact = mla_attention(*arguments, **batch)
        eager = eager_mla_attention(*arguments, **batch)
        report = check_against_reference(output, lse, exact, eager, dtype=self.query.dtype)
        if not report.ok or self.query.dtype == torch.float32:
            return report
        return self._report_by_request(output, exact, eager) or report

    def _report_by_request(
        self, output: torch.Tensor, exact: ReferenceResult, eager: ReferenceResult
    ) -> AccuracyReport | None:
        """Return the first report that is not ok, its ulp of the request's largest output."""
        starts = self.common.query_start_loc_cpu.tolist()
        for start, stop in itertools.pairwise(starts):
            rows = slice(start, stop)
            own, yardstick = (
                replace(x, output=x.output[rows], lse=x.lse[:, rows], num_tokens=stop - start)
                for x in (exact, eager)
            )
            largest = float(own.output.abs().max()) if stop > start else 0.0
            report = check_against_reference(
                output[rows],
                None,
                own,
                yardstick,
                dtype=self.query.dtype,
                value_abs_max=largest,
            )
            if not report.ok:
                return report
        return None


def layer(
    *, dims: MLADims = DIMS, heads: int = HEADS, dtype: torch.dtype = torch.float32, **options: Any
) -> MLAAttention:
    """Return a layer with a random up-projection; on torch alone where no backend is named."""
    generator = torch.Generator().manual_seed(7)
    rows = heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    weight = torch.randn(rows, dims.kv_lora_rank, generator=generator) * dims.kv_lora_rank**-0.5
    settings = {"block_size": BLOCK, "scale": SCALE, "backend": "TORCH_MLA", **options}
    if "config" not in options:
        settings.setdefault("prefill", "TORCH_SDPA")
    return MLAAttention(
        num_heads=heads, kv_b_proj=weight.to(dtype), dims=dims, dtype=dtype, **settings
    )


def case(
    attn: MLAAttention,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Return a step over random latents; blocks of nobody, and slots of -1, hold NaN or nothing."""
    generator = torch.Generator().manual_seed(seed)
    dims, dtype = attn.request.mla, attn.request.dtype
    assert dims is not None
    size = attn.kv_cache_spec.block_size
    held = [max(pair) for pair in zip(query_lens, seq_lens, strict=True)]
    widest = max((-(-length // size) for length in held), default=1)
    table = torch.randperm(len(held) * widest + 2, generator=generator)
    table = table[: len(held) * widest].view(len(held), widest).int()
    kv_cache = attn.allocate(len(held) * widest + 2)
    computed = [max(0, total - length) for total, length in zip(seq_lens, query_lens, strict=True)]
    earlier = _draw(generator, sum(computed), dims, dtype)
    starts = torch.tensor([0, *torch.tensor(computed).cumsum(0)], dtype=torch.int32)
    slots = slot_mapping_for(table, starts, torch.tensor(computed, dtype=torch.int32), size)
    concat_and_cache_mla(kv_cache, attn.kv_cache_spec, *earlier, slots, scale=attn.k_scale)
    own = _draw(generator, sum(query_lens), dims, dtype)
    key = dims.qk_nope_head_dim + dims.qk_rope_head_dim
    query = torch.randn(sum(query_lens), attn.request.num_heads, key, generator=generator)
    common = CommonAttentionMetadata.from_lengths(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=table,
        block_size=size,
        **options,
    )
    return Case(
        attn=attn,
        common=common,
        query=query.to(dtype),
        latent=own[0],
        rope=own[1],
        kv_cache=kv_cache,
    )


def _draw(
    generator: torch.Generator, num_tokens: int, dims: MLADims, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    entries = torch.randn(num_tokens, dims.latent_size, generator=generator).to(dtype)
    latent, rope = entries.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=1)
    return latent, rope
