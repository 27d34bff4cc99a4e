"""The inputs of a direct call that reads a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_bench.contenders import Copy
from attn_bench.inputs import LayerTensors, Step, make_step, stored_keys_of
from attn_bench.workloads import Workload
from attn_shared.errors import UnsupportedOptionError
from attn_shared.kv_cache import spec_for
from attn_shared.request import AttentionRequest

__all__ = [
    "PeerInputs",
    "paged_copy",
    "paged_step",
    "peer_inputs",
    "refuse_latents",
    "refuse_options",
]

_BLOCK_SIZE = 16  # where the workload leaves it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerInputs:
    """What a direct call is made from: one filled cache, one batch.

    Attributes:
        query: (T, Hq, D).
        key_cache: (num_blocks, block_size, Hkv, D), dense but for a stride over blocks.
        value_cache: the same shape; of latents (num_blocks, block_size, 1, kv_lora_rank), the first
            columns of `key_cache`.
        block_table: (B, M) int32.
        seq_lens: (B,) int32, keys of each request.
        query_start_loc: (B + 1,) int32, prefix sums of the query lengths.
        output: (T, Hq, Dv), to write and return, or to leave alone.
        scale: factor on q.k.
        workload: the batch on the host.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    output: Tensor
    scale: float
    workload: Workload

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.key_cache.shape[1]

    @property
    def max_seq_len(self) -> int:
        """Keys that a row of the table has room for."""
        return self.block_table.shape[1] * self.block_size

    @property
    def window(self) -> tuple[int, int]:
        """(left, right) keys beside the query's own, -1 for unbounded, as most libraries say it."""
        left, right = self.workload.window_sides
        return (-1 if left is None else left, -1 if right is None else right)


def paged_step(workload: Workload, device: torch.device, num_layers: int) -> Step:
    """Return a step over caches in the default layout."""
    heads = workload.heads
    if heads.mla is not None and not heads.is_latent:
        raise UnsupportedOptionError(
            f"a prefill of {heads} brings its keys with the call, and this peer reads a cache.",
            hint="name an MLA prefill as the peer.",
        )
    request = AttentionRequest(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        mla=heads.mla,
        dtype=workload.dtype,
        kv_cache_dtype=workload.kv_cache_dtype,
    )
    spec = spec_for(request, block_size=workload.block_size or _BLOCK_SIZE)
    return make_step(workload, spec, device, num_layers)


def paged_copy(
    workload: Workload,
    step: Step,
    layer: LayerTensors,
    call: Callable[[], Any],
    *,
    tokens: Callable[[Any], Tensor] = lambda output: output,
    lse: Callable[[Any], Tensor] | None = None,
    compute_dtype: torch.dtype | None = None,
    error_factor: float = 1.0,
) -> Copy:
    """Return a call over one layer's cache.

    Args:
        workload: the batch.
        step: of the layer.
        layer: its tensors.
        call: what is timed.
        tokens: turns what `call` returns into (T, Hq, D).
        lse: turns it into (Hq, T), natural logarithm.
        compute_dtype: of the products, where it is not the query's.
        error_factor: how many times the contract's budget it may err.
    """
    return Copy(
        call=call,
        tokens=tokens,
        query=lambda: layer.query,
        keys=lambda request: stored_keys_of(step, layer, request, workload.seq_lens[request]),
        lengths=workload.lengths,
        lse=lse,
        window=workload.window_sides,
        scale=workload.heads.softmax_scale,
        compute_dtype=compute_dtype,
        error_factor=error_factor,
    )


def peer_inputs(workload: Workload, step: Step, layer: LayerTensors) -> PeerInputs:
    """Return what a direct call over one layer's cache is made from."""
    common, views = step.common, step.spec.split(layer.kv_cache)
    if common.block_table is None:
        raise TypeError("a step of make_step has a block table")
    return PeerInputs(
        query=layer.query,
        key_cache=views.key,
        value_cache=views.value,
        block_table=common.block_table,
        seq_lens=common.seq_lens,
        query_start_loc=common.query_start_loc,
        output=layer.output,
        scale=workload.heads.softmax_scale,
        workload=workload,
    )


def refuse_latents(name: str, workload: Workload) -> None:
    """Refuse latent attention, for a peer that has ordinary heads.

    Raises:
        UnsupportedOptionError: names the peer and the layer.
    """
    if workload.heads.mla is not None:
        raise UnsupportedOptionError(
            f"{name} has no latent attention, as of {workload.heads}; allowed: ordinary heads."
        )


def refuse_options(
    name: str, workload: Workload, *, is_quantised: bool = False, has_window: bool = False
) -> None:
    """Refuse what a peer does not do; each flag says that it does.

    Raises:
        UnsupportedOptionError: names the option.
    """
    refuse_latents(name, workload)
    if workload.kv_cache_dtype != "auto" and not is_quantised:
        raise UnsupportedOptionError(
            f"{name} reads no cache of kv_cache_dtype={workload.kv_cache_dtype}; allowed: auto."
        )
    if workload.window is not None and not has_window:
        raise UnsupportedOptionError(f"{name} has no window={workload.window}; allowed: None.")
    if workload.returns_lse:
        raise UnsupportedOptionError(f"{name} returns no LSE; allowed: workloads without.")
