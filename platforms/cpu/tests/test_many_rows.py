"""Many rows over many keys, on every instruction set: what kernels that take blocks may miss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_cpu_testing import attention_arguments, levels, needs_kernels, plan_of, run

from attn_cpu.isa import IsaLevel
from attn_shared.accuracy import check_against_reference, eager_attention
from attn_shared.reference import AttentionOptions, paged_attention

pytestmark = needs_kernels

KEYS, QUERIES, HEADS, KV_HEADS, BLOCK = 1296, 90, 4, 2, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_left": 200, "window_right": 0},
    "narrow window": {"window_left": 20, "window_right": 0},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, 3.0, -2.0, 90.0])},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.01])},
    "ranges": {"mm_prefix_ranges": torch.tensor([[0, 1230, 1290]], dtype=torch.int32)},
    "negative scale": {"scale": -0.2},
}


def _arguments(sizes: tuple[int, int], dtype: torch.dtype, **changes: Any) -> dict[str, Any]:
    """Return a call of one request whose last QUERIES tokens see up to KEYS keys."""
    generator = torch.Generator().manual_seed(0)
    blocks = KEYS // BLOCK

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    arguments = attention_arguments(
        query=rows(QUERIES, HEADS, sizes[0]),
        out=torch.zeros(QUERIES, HEADS, sizes[1], dtype=dtype),
        lse=torch.zeros(HEADS, QUERIES),
        key=rows(blocks, BLOCK, KV_HEADS, sizes[0]),
        value=rows(blocks, BLOCK, KV_HEADS, sizes[1]),
        block_table=torch.randperm(blocks, generator=generator).int().unsqueeze(0),
        query_start_loc=torch.tensor([0, QUERIES], dtype=torch.int32),
        seq_lens=torch.tensor([KEYS], dtype=torch.int32),
        scale=sizes[0] ** -0.5,
    )
    arguments |= changes
    return arguments | {"plan": plan_of(arguments)}


def _problems(arguments: dict[str, Any]) -> dict[str, str]:
    """Return what is wrong, by level, with the LSE and without."""
    options = AttentionOptions(
        scale=arguments["scale"],
        window=(arguments["window_left"], arguments["window_right"]),
        softcap=arguments["softcap"],
        sinks=arguments["sinks"],
        alibi_slopes=arguments["alibi_slopes"],
    )
    batch = {name: arguments[name] for name in ("query_start_loc", "seq_lens", "block_table")}
    if arguments["mm_prefix_ranges"] is not None:
        batch["mm_prefix_ranges"] = {0: [tuple(arguments["mm_prefix_ranges"][0, 1:].tolist())]}
    inputs = (arguments["query"], arguments["key"], arguments["value"])
    dtype = arguments["query"].dtype
    exact = paged_attention(*inputs, options, **batch)
    eager = eager_attention(*inputs, options, **batch, compute_dtype=dtype)
    found = {}
    for level in levels():
        for lse in (arguments["lse"], None):
            out = run(arguments | {"isa": int(IsaLevel[level.upper()]), "lse": lse})
            report = check_against_reference(out, lse, exact, eager, dtype=dtype)
            if not report.ok:
                found[f"{level}, {'no ' if lse is None else ''}LSE"] = str(report)
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options: dict[str, Any]) -> None:
    assert _problems(_arguments((64, 64), torch.bfloat16, **options)) == {}


@pytest.mark.parametrize(
    "sizes",
    [(32, 32), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (64, 72)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sizes(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    assert _problems(_arguments(sizes, dtype)) == {}


@pytest.mark.parametrize("growth", [-300.0, 30.0, 300.0, 3000.0])
@pytest.mark.parametrize("options", ["causal", "window", "ranges"])
def test_logits_that_grow_or_fall_along_the_keys(growth: float, options: str) -> None:
    """Later keys outweigh all before them, by more than sums of weights can hold, or vanish."""
    arguments = _arguments((64, 64), torch.bfloat16, **OPTIONS[options])
    positions = torch.arange(KEYS)
    blocks = arguments["block_table"][0, positions // BLOCK].long()
    arguments["query"][..., 0] = 8.0
    slope = (growth * positions / KEYS).to(torch.bfloat16).unsqueeze(-1)
    arguments["key"][blocks, positions % BLOCK, :, 0] = slope
    assert _problems(arguments) == {}


def test_many_weights_below_the_limit_of_one() -> None:
    """Every key but the first few weighs 2^39 times as much as they do: the sum passes 2^40."""
    arguments = _arguments((64, 64), torch.bfloat16, scale=1.0)
    arguments["query"].zero_()[..., 0] = 1.0
    arguments["key"].zero_()[..., 0] = 27.0
    first = arguments["block_table"][0, : 128 // BLOCK].long()
    arguments["key"][first] = 0.0
    assert _problems(arguments) == {}


@pytest.mark.parametrize("position", [0, 700, KEYS - 1])
def test_what_is_seen_of_nan_is_nan(position: int) -> None:
    arguments = _arguments((64, 64), torch.bfloat16)
    block = int(arguments["block_table"][0, position // BLOCK])
    arguments["key"][block, position % BLOCK, 0] = torch.nan
    group = HEADS // KV_HEADS
    for level in levels():
        out = run(arguments | {"isa": int(IsaLevel[level.upper()]), "lse": None})
        seen = torch.arange(QUERIES) + KEYS - QUERIES >= position
        assert torch.equal(out[:, :group].isnan().all(-1).all(-1), seen), level
        assert not out[:, group:].isnan().any(), level
