"""Multi-head latent attention over a sharded cache, by a backend that is the reference."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from layer_cases import BLOCK

from attn_shared._ranks_layer import require_ranks_step
from attn_shared.accuracy import check_against_reference, eager_mla_decode
from attn_shared.backend import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)
from attn_shared.capability import Capability, DeviceLimit, MultipleOf, SizeSet, Support
from attn_shared.context_parallel import local_slot_mapping
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.inventory import Inventory
from attn_shared.kv_write import concat_and_cache_mla, slot_mapping_for
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla import MLAAttention
from attn_shared.mla_reference import eager_mla_attention, mla_attention
from attn_shared.ranks import ContextParallel
from attn_shared.reference import mla_decode
from attn_shared.request import MLADims
from attn_shared.sharded_batch import sharded_batch
from attn_shared.spec import BuildConfig

DIMS = MLADims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
HEADS, SCALE = 3, 0.3
GATHERED = {
    f"mla {backend} {dcp} {interleave} {size}": (backend, dcp, interleave, size)
    for backend, dcp, interleave, size in (
        ("TORCH_MLA", 2, 1, 2**28),
        ("TORCH_MLA", 4, 4, 2**28),
        ("TORCH_MLA", 2, 4, 20_000),  # chunks of a few blocks
        ("TORCH_MLA", 4, 1, 20_000),
    )
}
CASES = {f"mla {dcp} {interleave}": (dcp, interleave) for dcp in (2, 4) for interleave in (1, 4)}
QUERY_LENS, SEQ_LENS = (1, 3, 40, 1, 9), (18, 3, 61, 0, 100)


class _Builder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> CommonAttentionMetadata:
        return common


class _Impl(MLAAttentionImpl[CommonAttentionMetadata]):
    can_return_lse = True

    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CommonAttentionMetadata,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert metadata.block_table is not None
        found = mla_decode(
            query,
            kv_cache,
            scale=self.spec.scale,
            kv_lora_rank=DIMS.kv_lora_rank,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            causal=metadata.causal,
        )
        if lse is not None:
            lse.copy_(found.lse)
        return found.output.to(query.dtype)


class MlaReference(AttentionBackend):
    """Latent attention by `reference.mla_decode`."""

    name = "SHARDED_MLA_REFERENCE"
    attn_api = ">=1,<2"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        return Capability(
            devices=(DeviceLimit(vendor=Vendor.CPU),),
            dtypes=frozenset({torch.float32}),
            head_sizes=SizeSet(),
            block_sizes=(MultipleOf(1),),
            is_mla=True,
            non_causal=Support.YES,
            lse=Support.YES,
            dcp=Support.YES,
        )

    @staticmethod
    def get_impl_cls() -> type[_Impl]:
        return _Impl

    @staticmethod
    def get_builder_cls() -> type[_Builder]:
        return _Builder


def run(group: dist.ProcessGroup, interleave: int) -> str:
    """Return what is wrong with this rank's answer, "" if nothing is."""
    place = ContextParallel(dcp_group=group, interleave=interleave)
    generator = torch.Generator().manual_seed(interleave)
    weights = torch.randn(place.dcp_size, HEADS * 16, DIMS.kv_lora_rank, generator=generator)
    attn = MLAAttention(
        num_heads=HEADS,
        kv_b_proj=weights[place.dcp_rank],
        scale=SCALE,
        dims=DIMS,
        dtype=torch.float32,
        backend=MlaReference.name,
        block_size=BLOCK,
        context_parallel=place,
    )
    lens = [max(each) for each in zip(QUERY_LENS, SEQ_LENS, strict=True)]
    entries = torch.randn(sum(lens), DIMS.latent_size, generator=generator)
    queries = torch.randn(
        place.dcp_size, sum(QUERY_LENS), HEADS, DIMS.latent_size, generator=generator
    )
    latent, rope = entries.split([DIMS.kv_lora_rank, DIMS.qk_rope_head_dim], dim=1)
    table = torch.randperm(35, generator=generator).view(5, 7).int()
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    whole, shard = attn.allocate(35), attn.allocate(35)
    everywhere = slot_mapping_for(table, starts, seq_lens, BLOCK)
    concat_and_cache_mla(whole, attn.kv_cache_spec, latent, rope, everywhere)
    own = local_slot_mapping(
        table,
        starts,
        seq_lens,
        BLOCK,
        world_size=place.dcp_size,
        rank=place.dcp_rank,
        interleave=interleave,
    )
    new = torch.cat(
        [
            torch.arange(stop - length, stop)
            for stop, length in zip(starts[1:].tolist(), QUERY_LENS, strict=True)
        ]
    )
    own[new] = -1
    concat_and_cache_mla(shard, attn.kv_cache_spec, latent, rope, own)
    common = sharded_batch(
        query_lens=QUERY_LENS, seq_lens=SEQ_LENS, block_table=table, block_size=BLOCK, place=place
    )
    plan = attn.plan(common)
    attn.update(latent[new], rope[new], shard, plan)
    query = queries[place.dcp_rank]
    lse = torch.zeros(HEADS, len(query))
    output = attn.decode(query, shard, plan, lse=lse)
    call: dict[str, Any] = {
        "scale": SCALE,
        "kv_lora_rank": DIMS.kv_lora_rank,
        "query_start_loc": common.query_start_loc,
        "seq_lens": common.seq_lens,
        "block_table": table,
    }
    exact, eager = mla_decode(query, whole, **call), eager_mla_decode(query, whole, **call)
    report = check_against_reference(output, lse, exact, eager, dtype=torch.float32)
    if not report.ok:
        return str(report)
    heads = torch.randn(place.dcp_size, len(query), HEADS, 12, generator=generator)
    expanded = heads[place.dcp_rank]
    output = attn.forward(expanded, latent[new], rope[new], shard, plan, lse=lse)
    arguments = expanded, whole, weights[place.dcp_rank], DIMS
    del call["kv_lora_rank"]
    exact, eager = mla_attention(*arguments, **call), eager_mla_attention(*arguments, **call)
    report = check_against_reference(output, lse, exact, eager, dtype=torch.float32)
    return "" if report.ok else f"forward: {report}"


def run_gathered(group: dist.ProcessGroup, backend: str, interleave: int, workspace: int) -> str:
    """Return what is wrong with prefills that gather latents; "" if nothing is.

    The same request lengths come in another order, and in a second step whose prompts are chunks.
    """
    place = ContextParallel(dcp_group=group, interleave=interleave)
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(place.dcp_size, HEADS * 16, DIMS.kv_lora_rank, generator=generator)
    attn = MLAAttention(
        num_heads=HEADS,
        kv_b_proj=weights[place.dcp_rank],
        scale=SCALE,
        dims=DIMS,
        dtype=torch.float32,
        backend=backend,
        prefill="TORCH_SDPA",
        block_size=BLOCK,
        context_parallel=place,
        config=BuildConfig(mla_workspace_bytes=workspace),
    )
    assert attn.prefill_selection is not None
    steps = [((40, 1, 3, 0, 25), (40, 1, 3, 0, 25)), ((9, 1, 30, 12, 1), (49, 2, 33, 12, 26))]
    entries = torch.randn(5, 49, DIMS.latent_size, generator=generator)
    table = torch.randperm(35, generator=generator).view(5, 7).int()
    whole, shard = attn.allocate(35), attn.allocate(35)
    for query_lens, seq_lens in steps:
        new = torch.cat(
            [
                entries[row, stop - length : stop]
                for row, (length, stop) in enumerate(zip(query_lens, seq_lens, strict=True))
            ]
        )
        latent, rope = new.split([DIMS.kv_lora_rank, DIMS.qk_rope_head_dim], dim=1)
        common = sharded_batch(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=table,
            block_size=BLOCK,
            place=place,
        )
        starts, lens = common.query_start_loc, common.seq_lens
        slots = slot_mapping_for(table, starts, lens, BLOCK)
        concat_and_cache_mla(whole, attn.kv_cache_spec, latent, rope, slots)
        heads = torch.randn(place.dcp_size, len(new), HEADS, 12, generator=generator)
        plan = attn.plan(common)
        gathered = require_ranks_step(plan.metadata).gathered
        long = sum(length for length in query_lens if length > 8)
        if gathered is None or gathered.num_prefill_tokens < long:
            return f"{long} rows are longer than a decode, and the step has {gathered}"
        query, lse = heads[place.dcp_rank], torch.zeros(HEADS, len(new))
        output = attn.forward(query, latent, rope, shard, plan, lse=lse)
        arguments = query, whole, weights[place.dcp_rank], DIMS
        call: dict[str, Any] = {
            "scale": SCALE,
            "query_start_loc": starts,
            "seq_lens": lens,
            "block_table": table,
        }
        exact, eager = mla_attention(*arguments, **call), eager_mla_attention(*arguments, **call)
        report = check_against_reference(output, lse, exact, eager, dtype=torch.float32)
        if not report.ok:
            return f"lengths {query_lens}: {report}"
    return ""
