"""One rank of test_context_parallel: run as a program, it writes what each case returned.

Every rank knows every shard, so that the test can say what the combined result must be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from attn_shared.context_parallel import cp_lse_ag_out_rs, dcp_a2a_lse_reduce, owner_of
from attn_shared.errors import InvalidInputError

WORLD_SIZE = 2
TOKENS, HEADS, WIDTH, KEYS = 5, 4, 6, 11
COMBINES: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "ag_rs": cp_lse_ag_out_rs,
    "a2a": dcp_a2a_lse_reduce,
}

SINKS = torch.tensor([-torch.inf, 0.0, 1.5, 40.0])

Partial = tuple[torch.Tensor, torch.Tensor]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Partial:
    """Softmax attention of (T, H, D) over (K, H, D): output (T, H, D) and LSE (H, T), float64."""
    logits = torch.einsum("thd,khd->htk", query, key)
    lse = logits.logsumexp(-1)
    weights = (logits - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)).exp()
    return torch.einsum("htk,khd->thd", weights, value), lse


def problem(interleave: int) -> tuple[list[Partial], Partial]:
    """Return the partial result of each rank, and the unsharded one, in float64."""
    generator = torch.Generator().manual_seed(interleave)
    query, key, value = (
        torch.randn(count, HEADS, WIDTH, generator=generator, dtype=torch.float64)
        for count in (TOKENS, KEYS, KEYS)
    )
    owner = owner_of(torch.arange(KEYS), WORLD_SIZE, interleave)
    shards = [attend(query, key[owner == rank], value[owner == rank]) for rank in range(WORLD_SIZE)]
    return shards, attend(query, key, value)


def hollow(shards: list[Partial]) -> list[Partial]:
    """Empty some rows in each way kernels do: token 0 on rank 0, 1 on rank 1, 2 on both."""
    (out_a, lse_a), (out_b, lse_b) = shards
    out_a[0], lse_a[:, 0] = torch.nan, -torch.inf
    out_b[1], lse_b[:, 1] = torch.inf, torch.inf
    out_a[2], lse_a[:, 2] = torch.nan, torch.nan
    out_b[2], lse_b[:, 2] = 7.0, -torch.inf
    return shards


def cases() -> Iterator[tuple[str, Partial, bool]]:
    """Yield (name, this rank's partial result, lse_base_on_e) of every case."""
    rank = dist.get_rank()
    for interleave in (1, 4, 16):  # with 16, all keys live on rank 0
        shards, _ = problem(interleave)
        output, lse = shards[rank]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield f"{interleave} {dtype}", (output.to(dtype), lse.float()), True
        base2 = lse.float() / torch.log(torch.tensor(2.0))
        yield f"{interleave} log2", (output.float(), base2), False
    output, lse = hollow(problem(1)[0])[rank]
    yield "hollow", (output.float(), lse.float()), True
    strided = torch.empty(HEADS, WIDTH, TOKENS).permute(2, 0, 1).copy_(problem(1)[0][rank][0])
    columns = torch.empty(TOKENS, HEADS).T.copy_(problem(1)[0][rank][1])
    yield "strided", (strided, columns), True
    yield "no tokens", (torch.zeros(0, HEADS, WIDTH), torch.zeros(HEADS, 0)), True


def refusal(combine: Callable[..., object]) -> str:
    """Return the words of the refusal, which comes from one rank alone: nobody communicates."""
    try:
        combine(torch.zeros(TOKENS, 3, WIDTH), torch.zeros(3, TOKENS), dist.group.WORLD)
    except InvalidInputError as error:
        return str(error)
    return ""


def main(rank: int, folder: Path) -> None:
    """Join the group, run every case, and leave the results in the folder."""
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    results: dict[str, object] = {}
    for name, combine in COMBINES.items():
        if rank == 1:
            results[f"{name} refusal"] = refusal(combine)
        for case, (output, lse), base_on_e in cases():
            results[f"{name} {case}"] = combine(
                output, lse, dist.group.WORLD, lse_base_on_e=base_on_e
            )
        output, lse = hollow(problem(1)[0])[rank]
        results[f"{name} sinks"] = combine(
            output.float(), lse.float(), dist.group.WORLD, sinks=SINKS
        )
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
