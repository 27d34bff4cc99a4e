"""One rank of test_context_parallel_layer: run as a program, it holds each case to the reference.

Every rank knows every rank's queries and all keys. It runs its own share of a case through
`Attention`, and compares with the float64 reference over the unsharded cache, by the budget that
every backend has. What it found goes into a file: a word for each failure.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import layer_mla
import torch
import torch.distributed as dist
from layer_cases import BLOCK, Case, cases

from attn_conformance.reference_backend import REFERENCE_CAPABILITY, ReferenceBackend
from attn_shared.accuracy import check_against_reference, eager_attention
from attn_shared.backend_names import register_backend
from attn_shared.capability import Support
from attn_shared.context_parallel import local_slot_mapping
from attn_shared.device import DeviceFacts, preset
from attn_shared.errors import AttnError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.kv_write import slot_mapping_for, write_kv
from attn_shared.layer import Attention
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ranks import ContextParallel, NoGroup
from attn_shared.reference import AttentionOptions, paged_attention
from attn_shared.selector import Selector
from attn_shared.sharded_batch import sharded_batch
from attn_shared.spec import BuildConfig

WORLD_SIZE = 4
TIMEOUT = 60

Groups = dict[str, Any]


class Problem:
    """The tensors of a case, the same on all ranks."""

    def __init__(self, case: Case, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        width_v = case.width if case.width_v is None else case.width_v
        self.lens = [max(each) for each in zip(case.query_lens, case.seq_lens, strict=True)]
        rows, tokens = sum(case.query_lens), sum(self.lens)
        shape = (case.dcp, rows, case.heads, case.width)
        self.queries = torch.randn(shape, generator=generator).to(case.dtype)
        self.keys = torch.randn(tokens, case.kv_heads, case.width, generator=generator)
        self.values = torch.randn(tokens, case.kv_heads, width_v, generator=generator)
        self.keys, self.values = self.keys.to(case.dtype), self.values.to(case.dtype)
        self.sinks = torch.randn(case.dcp, case.heads, generator=generator)
        self.slopes = torch.rand(case.dcp, case.heads, generator=generator) / 4
        longest = max(case.seq_lens, default=0)
        self.num_columns = max(1, -(-longest // BLOCK))
        count = len(case.seq_lens) * self.num_columns
        order = torch.randperm(count, generator=generator)
        self.table = order.view(len(case.seq_lens), self.num_columns).int()
        self.num_blocks = max(1, count)


def _starts(lens: tuple[int, ...] | list[int]) -> torch.Tensor:
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(lens, dtype=torch.int32).cumsum(0)
    return starts


def run(case: Case, groups: Groups, seed: int) -> str:
    """Return what is wrong with this rank's answer, "" if nothing is."""
    place = ContextParallel(
        dcp_group=groups.get(f"dcp {case.dcp} {case.pcp}", NoGroup.LEFT_OUT),
        pcp_group=groups.get(f"pcp {case.dcp} {case.pcp}", NoGroup.LEFT_OUT),
        interleave=case.interleave,
        combine=case.combine,
    )
    made = Problem(case, seed)
    head_group = place.dcp_rank
    attn = Attention(
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_size=case.width,
        head_size_v=case.width_v,
        dtype=case.dtype,
        backend=case.backend,
        block_size=BLOCK,
        window=(None if case.window is None else case.window - 1, None),
        sinks=made.sinks[head_group] if case.sinks else None,
        alibi_slopes=made.slopes[head_group] if case.alibi else None,
        k_scale=case.k_scale,
        v_scale=case.k_scale,
        config=BuildConfig(checked=case.checked),
        context_parallel=place,
        **case.options,
    )
    spec = attn.kv_cache_spec
    assert isinstance(spec, AttentionSpec)
    shard = attn.allocate(made.num_blocks)
    whole = spec.allocate(made.num_blocks, "cpu")
    _write_history(case, made, spec, place, shard, whole)
    new = _new_tokens(case, made)
    common = _batch(case, made, place)
    plan = attn.plan(common, num_blocks=made.num_blocks if case.checked else None)
    rows = torch.arange(sum(case.query_lens)) if plan.rows is None else plan.rows
    query = made.queries[head_group][rows]
    key, value = made.keys[new][rows], made.values[new][rows]
    lse = torch.full((case.heads, len(rows)), torch.nan)
    is_writer = not case.reads_cache_only
    output = attn.forward(
        query, key if is_writer else None, value if is_writer else None, shard, plan, lse=lse
    )
    return _verdict(case, made, attn, whole, common, (rows, output, lse))


def _write_history(
    case: Case,
    made: Problem,
    spec: AttentionSpec,
    place: ContextParallel,
    shard: torch.Tensor,
    whole: torch.Tensor,
) -> None:
    """Write all tokens to the whole cache, and the earlier ones of this rank to its shard."""
    starts, lens = _starts(made.lens), torch.tensor(case.seq_lens, dtype=torch.int32)
    if not len(lens):
        return
    scales: dict[str, Any] = {"k_scale": case.k_scale, "v_scale": case.k_scale}
    everywhere = slot_mapping_for(made.table, starts, lens, BLOCK)
    write_kv(whole, spec, made.keys, made.values, everywhere, **scales)
    own = local_slot_mapping(
        made.table,
        starts,
        lens,
        BLOCK,
        world_size=place.dcp_size,
        rank=place.dcp_rank,
        interleave=case.interleave,
    )
    if not case.reads_cache_only:
        own[_new_tokens(case, made)] = -1
    write_kv(shard, spec, made.keys, made.values, own, **scales)


def _new_tokens(case: Case, made: Problem) -> torch.Tensor:
    """Return which of all tokens are the step's."""
    stops = _starts(made.lens)[1:].tolist()
    spans = [
        torch.arange(stop - length, stop)
        for stop, length in zip(stops, case.query_lens, strict=True)
    ]
    return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


def _batch(case: Case, made: Problem, place: ContextParallel) -> CommonAttentionMetadata:
    options: dict[str, Any] = {"mm_prefix_ranges": case.ranges}
    if isinstance(case.causal, tuple):
        flags = torch.tensor(case.causal)
        options |= {"causal": flags, "causal_cpu": flags}
    else:
        options["causal"] = case.causal
    common = sharded_batch(
        query_lens=case.query_lens,
        seq_lens=case.seq_lens,
        block_table=made.table,
        block_size=BLOCK,
        place=place,
        **options,
    )
    if case.host_lengths_exceed_by:
        bound = common.seq_lens + case.host_lengths_exceed_by
        return common.with_fields(seq_lens_cpu=bound, seq_lens_cpu_is_exact=False)
    if case.has_exact_lengths:
        return common
    return common.with_fields(seq_lens_cpu=None, dcp_local_seq_lens_cpu=None)


def _verdict(
    case: Case,
    made: Problem,
    attn: Attention,
    whole: torch.Tensor,
    common: CommonAttentionMetadata,
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> str:
    rows, output, lse = found
    if not len(made.queries[0]):
        return "" if output.shape[0] == 0 else f"output {tuple(output.shape)}"
    head_group = attn.spec.dcp_rank
    spec = attn.kv_cache_spec
    assert isinstance(spec, AttentionSpec)
    views = spec.split(whole)
    options = AttentionOptions(
        scale=attn.spec.scale,
        window=attn.request.window,
        softcap=attn.request.softcap,
        chunk_size=attn.request.chunk_size,
        sinks=made.sinks[head_group] if case.sinks else None,
        alibi_slopes=made.slopes[head_group] if case.alibi else None,
    )
    call: dict[str, Any] = {
        "query_start_loc": common.query_start_loc,
        "seq_lens": common.seq_lens,
        "block_table": made.table,
        "causal": common.causal,
        "mm_prefix_ranges": case.ranges,
        "k_scale": case.k_scale,
        "v_scale": case.k_scale,
        "key_scales": views.key_scale,
        "value_scales": views.value_scale,
    }
    inputs = (made.queries[head_group], views.key, views.value, options)
    exact, eager = paged_attention(*inputs, **call), eager_attention(*inputs, **call)
    mine = exact.output.new_full(exact.output.shape, 0.0).to(case.dtype)
    mine.copy_(exact.output)  # rows of other ranks are not this one's to get right
    mine[rows] = output
    sums = exact.lse.float()
    sums[:, rows] = lse
    report = check_against_reference(mine, sums, exact, eager, dtype=case.dtype)
    return "" if report.ok else str(report)


def _refused(act: Callable[[], object]) -> str:
    """Return what was said when something was refused, "" if it was not."""
    try:
        act()
    except AttnError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class OtherFlavour(Selector):
    """Sees devices whose fp8 e4m3 is that of gfx942."""

    def device_facts(self, device: torch.device) -> DeviceFacts:
        return preset("mi300x")


def refusals(rank: int, groups: Groups) -> dict[str, str]:
    """Return what this rank is told in each wrong set-up."""
    group = groups["dcp 4 1"]

    def build(**options: Any) -> Attention:
        place: dict[str, Any] = {"dcp_group": group, **options.pop("place", {})}
        given: dict[str, Any] = {
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_size": 16,
            "dtype": torch.float32,
            "block_size": BLOCK,
            "backend": "TORCH_SDPA",
            **options,
        }
        return Attention(**given, context_parallel=ContextParallel(**place))

    found = {
        "interleave": _refused(lambda: build(place={"interleave": 32})),
        "odd interleave": _refused(lambda: build(place={"interleave": 3})),
        "alibi": _refused(
            lambda: build(place={"interleave": 4}, alibi_slopes=torch.tensor([0.5, 0.25]))
        ),
        "chunks": _refused(lambda: build(chunk_size=8)),
        "window": _refused(lambda: build(window=(3, 3), non_causal=True)),
        "encoder": _refused(lambda: build(attn_type="encoder_only")),
        "ag_rs": _refused(lambda: build(place={"combine": "ag_rs"}, batch_invariant=True)),
        "combine": _refused(lambda: build(place={"combine": "ring"})),
        "size": _refused(lambda: build(dcp_size=2)),
        "no lse": _refused(lambda: build(backend="NO_LSE")),
        # From here on all ranks meet in a comparison, and each is told.
        "heads": _refused(lambda: build(num_heads=2 if rank else 4)),
        "flavours": _refused(
            lambda: build(kv_cache_dtype="fp8", selector=OtherFlavour() if rank else Selector())
        ),
        "interleaves": _refused(lambda: build(place={"interleave": 4 if rank == 3 else 1})),
    }
    attn = build()
    lens = [5, 7 if rank == 2 else 6]
    common = sharded_batch(
        query_lens=[1, 1],
        seq_lens=lens,
        block_table=torch.tensor([[0], [1]]),
        block_size=BLOCK,
        place=ContextParallel(dcp_group=group),
    )
    found["batch"] = _refused(lambda: attn.plan(common))
    shares = common.with_fields(dcp_local_seq_lens_cpu=torch.zeros(2, dtype=torch.int32))
    found["shares"] = _refused(lambda: attn.plan(shares))
    return found


def invariance(groups: Groups) -> str:
    """Return whether a request's rows change, by a bit, with what shares its batch."""
    place = ContextParallel(dcp_group=groups["dcp 4 1"], interleave=4)
    attn = Attention(
        num_heads=2,
        num_kv_heads=1,
        head_size=32,
        dtype=torch.bfloat16,
        block_size=BLOCK,
        backend="TORCH_SDPA",
        batch_invariant=True,
        context_parallel=place,
    )
    generator = torch.Generator().manual_seed(0)
    cache = attn.allocate(12)
    cache.copy_(torch.randn(cache.shape, generator=generator))
    query_lens, seq_lens = [40, 1, 5], [150, 90, 77]
    query = torch.randn(sum(query_lens), 2, 32, generator=generator).bfloat16()
    table = torch.arange(12).view(3, 4)

    def answer(requests: list[int], rows: torch.Tensor) -> torch.Tensor:
        common = sharded_batch(
            query_lens=[query_lens[index] for index in requests],
            seq_lens=[seq_lens[index] for index in requests],
            block_table=table[requests],
            block_size=BLOCK,
            place=place,
        )
        return attn.forward(query[rows], None, None, cache, attn.plan(common))

    together = answer([0, 1, 2], torch.arange(46))
    starts = [0, 40, 41, 46]
    for index in range(3):
        rows = torch.arange(starts[index], starts[index + 1])
        if not torch.equal(answer([index], rows), together[rows]):
            return f"request {index} differs"
    return ""


def replays(groups: Groups) -> str:
    """Return what is wrong with a step that is refreshed where it stands."""
    place = ContextParallel(dcp_group=groups["dcp 4 1"], interleave=4)
    for options in ({}, {"window": (20, 0)}, {"alibi_slopes": torch.tensor([0.5, 0.1])}):
        if "alibi_slopes" in options:
            place = replace(place, interleave=1)
        attn = Attention(
            num_heads=2,
            num_kv_heads=1,
            head_size=16,
            dtype=torch.float32,
            block_size=BLOCK,
            backend="SHARDED_REFERENCE",
            context_parallel=place,
            **options,
        )
        words = _replay(attn, place)
        if words:
            return f"{words} with {options}"
    return ""


def _replay(attn: Attention, place: ContextParallel) -> str:
    generator = torch.Generator().manual_seed(0)
    replayed, planned = attn.allocate(9), attn.allocate(9)
    replayed.copy_(torch.randn(replayed.shape, generator=generator))
    planned.copy_(replayed)

    def batch(seq_lens: list[int], order: list[int]) -> CommonAttentionMetadata:
        return sharded_batch(
            query_lens=[1, 2, 1],
            seq_lens=seq_lens,
            block_table=torch.arange(9).view(3, 3)[order],
            block_size=BLOCK,
            place=place,
        )

    plan = attn.plan_for_capture(batch([190, 190, 190], [0, 1, 2]))
    parts = [part.common for part, _ in plan.metadata.sharded.parts]
    places = [part.seq_lens.data_ptr() for part in parts]
    for seq_lens, order in (([7, 150, 0], [2, 0, 1]), ([100, 2, 33], [1, 2, 0])):
        common = batch(seq_lens, order)
        attn.refresh(plan, common)
        query = torch.randn(4, 2, 16, generator=generator)
        key, value = torch.randn(2, 4, 1, 16, generator=generator)
        found = attn.forward(query, key, value, replayed, plan)
        expected = attn.forward(query, key, value, planned, attn.plan(common))
        if not torch.allclose(found, expected, atol=1e-6) or not torch.equal(replayed, planned):
            return f"a step over {seq_lens} differs"
    if places != [part.seq_lens.data_ptr() for part in parts]:
        return "a tensor moved"
    longer = _refused(lambda: attn.refresh(plan, batch([191, 9, 9], [0, 1, 2])))
    if "max_seq_len is 191; allowed: at most 190" not in longer:
        return f"said {longer!r}"
    other = sharded_batch(
        query_lens=[2, 1, 1],
        seq_lens=[9, 9, 9],
        block_table=torch.arange(9).view(3, 3),
        block_size=BLOCK,
        place=place,
    )
    words = _refused(lambda: attn.refresh(plan, other))
    return "" if "query lengths is [2, 1, 1]; allowed: [1, 2, 1]" in words else f"said {words!r}"


def make_groups() -> Groups:
    """Return this rank's groups by sizes: ranks of a DCP group are neighbours."""
    rank = dist.get_rank()
    groups: Groups = {"dcp 4 1": dist.group.WORLD, "pcp 1 4": dist.group.WORLD}
    neighbours = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups["dcp 2 1"] = groups["dcp 2 2"] = groups["pcp 1 2"] = neighbours[rank // 2]
    groups["pcp 2 2"] = across[rank % 2]
    return groups


def die_while_others_wait(rank: int, groups: Groups) -> tuple[str, float]:
    """Let the last rank vanish before a step; return what the others saw, and after how long."""
    attn = Attention(
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.float32,
        block_size=BLOCK,
        backend="TORCH_SDPA",
        context_parallel=ContextParallel(dcp_group=groups["dcp 4 1"]),
    )
    common = sharded_batch(
        query_lens=[1],
        seq_lens=[9],
        block_table=torch.tensor([[0]]),
        block_size=BLOCK,
        place=ContextParallel(dcp_group=groups["dcp 4 1"]),
    )
    plan, cache = attn.plan(common), attn.allocate(1)
    if rank == WORLD_SIZE - 1:
        os._exit(17)
    started = time.monotonic()
    try:
        attn.forward(torch.zeros(1, 2, 16), None, None, cache, plan)
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def register_backends() -> None:
    """Register the reference backend, and one that returns no LSE."""
    register_backend("SHARDED_REFERENCE", f"{__name__}:ShardedReference")
    register_backend(layer_mla.MlaReference.name, layer_mla.MlaReference)
    register_backend("NO_LSE", f"{__name__}:NoLse")


class ShardedReference(ReferenceBackend):
    """The reference backend under a name of its own."""

    name = "SHARDED_REFERENCE"


class NoLse(ReferenceBackend):
    """One that would be sharded and returns no LSE."""

    name = "NO_LSE"
    served = replace(REFERENCE_CAPABILITY, lse=Support.NO)


def main(rank: int, folder: Path) -> None:
    """Join the group, run every case, and leave the results in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT),
    )
    groups = make_groups()
    register_backends()
    results: dict[str, Any] = {}
    for seed, (name, case) in enumerate(cases().items()):
        try:
            results[name] = run(case, groups, seed)
        except AttnError as error:
            results[name] = f"{type(error).__name__}: {error}"
    for name, (dcp, interleave) in layer_mla.CASES.items():
        results[name] = layer_mla.run(groups[f"dcp {dcp} 1"], interleave)
    for name, (backend, dcp, interleave, size) in layer_mla.GATHERED.items():
        group = groups[f"dcp {dcp} 1"]
        results[name] = layer_mla.run_gathered(group, backend, interleave, size)
    results["invariance"] = invariance(groups)
    results["replays"] = replays(groups)
    results["refusals"] = refusals(rank, groups)
    torch.save(results, folder / f"rank{rank}.pt")
    results["death"] = die_while_others_wait(rank, groups)
    torch.save(results, folder / f"rank{rank}.pt")
    os._exit(0)  # the group is broken: nobody answers a farewell


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
