"""Runs the kernels over latents by themselves: plan, decode, combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_triton._steps import plan_ints
from attn_triton.kernels.combine import combine
from attn_triton.kernels.describing import described
from attn_triton.kernels.mla_decode import mla_decode
from attn_triton.kernels.plan import plan_step
from attn_triton.latent_tiles import COMBINE_COLUMNS
from attn_triton.launch import Launcher
from attn_triton.machine import machine_of
from attn_triton.tiles import Tile, next_power_of_2

LOG2E = 1.4426950408889634


@dataclass(kw_only=True)
class Latents:
    """A batch over a cache of random entries, NaN where nobody may look.

    Attributes:
        query: (T, H, latent + rope).
        cache: (blocks, page, latent + rope).
        table: (B, M) int32.
        lens: keys of each request.
        query_lens: query tokens of each.
        latent: width of the latent part.
        scale: of the logits.
        cache_scale: of an fp8 cache's entries.
    """

    query: Tensor
    cache: Tensor
    table: Tensor
    lens: list[int]
    query_lens: list[int]
    latent: int
    scale: float
    cache_scale: float = 1.0

    @property
    def starts(self) -> Tensor:
        sums = torch.tensor([0, *self.query_lens]).cumsum(0)
        return sums.to(device=self.query.device, dtype=torch.int32)

    @property
    def seq_lens(self) -> Tensor:
        return torch.tensor(self.lens, dtype=torch.int32, device=self.query.device)


def make(
    device: torch.device | str,
    lens: list[int],
    query_lens: list[int],
    *,
    heads: int,
    sizes: tuple[int, int] = (512, 64),
    page: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    nan_tails: bool = False,
    seed: int = 5,
) -> Latents:
    """Return a batch whose pages are shuffled; pages of nobody hold NaN, tails too if asked."""
    generator = torch.Generator().manual_seed(seed)
    width = sum(sizes)
    counts = [-(-n // page) for n in lens]
    order = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32)
    table = torch.full((len(lens), max(*counts, 1)), 2**30, dtype=torch.int32)
    cache = torch.randn(len(order), page, width, generator=generator)
    cache_scale = 1.0
    if cache_dtype is not None:
        cache_scale = 0.5
    at = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[at : at + count]
        if nan_tails and lens[b] % page:
            cache[order[at + count - 1], lens[b] % page :] = float("nan")
        at += count
    cache[order[at:].long()] = float("nan")
    query = torch.randn(sum(query_lens), heads, width, generator=generator)
    return Latents(
        query=query.to(dtype).to(device),
        cache=cache.to(cache_dtype or dtype).to(device),
        table=table.to(device),
        lens=lens,
        query_lens=query_lens,
        latent=sizes[0],
        scale=0.7 * width**-0.5,
        cache_scale=cache_scale,
    )


class Runner:
    """Launches the kernels for one batch with one tile."""

    def __init__(
        self,
        batch: Latents,
        tile: Tile,
        *,
        units: int,
        has_descriptors: bool,
        causal: bool = True,
        max_parts: int = 0,
        kernel: Any = mla_decode,
        describe: Any = described,
        combine_parts: int = 8,
    ) -> None:
        heads, width = batch.query.shape[1:]
        page, latent = batch.cache.shape[1], batch.latent
        rope = width - latent
        padded = [max(16, next_power_of_2(each)) for each in (latent, rope)]
        device = batch.query.device
        count = len(batch.lens)
        self.batch, self.causal = batch, causal
        self.max_rows = max(batch.query_lens) * heads
        blocks = -(-self.max_rows // tile.rows)
        slots = 0 if max_parts else max(1, units * tile.programs_per_unit // blocks)
        self.max_items = max_parts * count if max_parts else slots + count
        self.grid = (self.max_items * blocks, 1, 1)
        self.combine_grid = (count * self.max_rows * -(-padded[0] // COMBINE_COLUMNS), 1, 1)
        self.plan = torch.zeros(plan_ints(self.max_items, count), dtype=torch.int32, device=device)
        rows = self.max_items * self.max_rows
        self.parts = torch.full((rows, latent), float("nan"), device=device)
        self.stats = torch.full((rows, 2), float("nan"), device=device)
        self.starts, self.seq_lens = batch.starts, batch.seq_lens
        planner = Launcher(
            plan_step,
            {
                "LEFT": -1, "CHUNK": 0, "DENSE": False, "TILE": tile.keys,
                "MAX_PARTS": max_parts, "LEAST": 2, "BLOCK_B": next_power_of_2(max(16, count)),
            },
        )  # fmt: skip
        planner(
            (1, 1, 1), self.plan, self.starts, self.seq_lens,
            count, self.max_items, slots, max(batch.query_lens), heads, tile.rows,
        )  # fmt: skip
        constants = {
            "HQ": heads, "DL": latent, "DR": rope, "DLP": padded[0], "DRP": padded[1],
            "ROWS": tile.rows, "BN": tile.keys, "STAGES": tile.stages, "PAGE": page,
            "Q_TOKEN": batch.query.stride(0), "Q_HEAD": batch.query.stride(1),
            "O_TOKEN": heads * latent, "O_HEAD": latent,
            "K_BLOCK": batch.cache.stride(0), "K_TOKEN": batch.cache.stride(1),
            "CAUSAL": int(causal),
        }  # fmt: skip
        is_dependent = machine_of(device).has_dependent_launch
        is_early = is_dependent if kernel is mla_decode else None
        self.decode = Launcher(kernel, constants, num_warps=tile.num_warps, is_dependent=is_early)
        names = ("HQ", "O_TOKEN", "O_HEAD")
        self.combine = Launcher(
            combine,
            {name: constants[name] for name in names}
            | {"HK": 1, "DV": latent, "DVP": padded[0], "PARTS": combine_parts}
            | {"BV": min(padded[0], COMBINE_COLUMNS)},
            num_warps=1,
            is_dependent=is_dependent,
        )
        self.tiles = lambda cache: (None, None)
        if has_descriptors:
            self.tiles = lambda cache: descriptors(cache, latent, tile.keys, padded, describe)

    def __call__(
        self, output: Tensor, lse: Tensor | None, cache: Tensor | None = None, tiles: Any = None
    ) -> None:
        batch = self.batch
        cache = batch.cache if cache is None else cache
        latent_tiles, rope_tiles = self.tiles(cache) if tiles is None else tiles
        count = len(batch.lens)
        lse_stride = 0 if lse is None else lse.stride(0)
        self.decode(
            self.grid, batch.query, cache, latent_tiles, rope_tiles, output, lse,
            self.parts, self.stats, self.plan, batch.table, None,
            count, self.max_items, self.max_rows, batch.table.stride(0), lse_stride,
            batch.scale * LOG2E, batch.cache_scale,
        )  # fmt: skip
        self.combine(
            self.combine_grid, output, lse, self.parts, self.stats, self.plan, self.starts, None,
            count, self.max_items, self.max_rows, lse_stride,
        )  # fmt: skip


def descriptors(
    cache: Tensor, latent: int, keys: int, padded: list[int], describe: Any
) -> tuple[Any, Any]:
    """Return the descriptors of a cache's latents and rope parts, as rows of tokens."""
    blocks, page, _ = cache.shape
    token = cache.stride(1)
    rows = (blocks - 1) * (cache.stride(0) // token) + page
    parts = (cache[..., :latent], cache[..., latent:])
    first, second = (
        describe(part, part.data_ptr(), [rows, part.shape[2]], token, (keys, columns))
        for part, columns in zip(parts, padded, strict=True)
    )
    return first, second
