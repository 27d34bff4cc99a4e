"""Named sets of workloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from attn_bench.workloads import Heads, Workload, WorkloadPhase
from attn_shared.errors import UnknownNameError

__all__ = ["SETS", "workload_set"]


def _decode(batch: int, context: int) -> Workload:
    return Workload(
        phase=WorkloadPhase.DECODE, query_lens=(1,) * batch, seq_lens=(context,) * batch
    )


def _prefill(batch: int, length: int) -> Workload:
    return Workload(
        phase=WorkloadPhase.PREFILL, query_lens=(length,) * batch, seq_lens=(length,) * batch
    )


def _chunked(batch: int, query_len: int, context: int) -> Workload:
    return Workload(
        phase=WorkloadPhase.CHUNKED,
        query_lens=(query_len,) * batch,
        seq_lens=(context,) * batch,
    )


def _mixed(num_decodes: int, context: int, *prefills: int) -> Workload:
    """Decodes of growing contexts first, then prefills."""
    contexts = tuple(max(1, context * (i + 1) // num_decodes) for i in range(num_decodes))
    return Workload(
        phase=WorkloadPhase.MIXED,
        query_lens=(1,) * num_decodes + prefills,
        seq_lens=contexts + prefills,
        label=f"{num_decodes}d@{context}+{'+'.join(map(str, prefills))}p",
    )


def _steady(num_decodes: int, context: int, prefill: int) -> Workload:
    """Decodes of one context first, then one prefill."""
    return Workload(
        phase=WorkloadPhase.MIXED,
        query_lens=(*(1,) * num_decodes, prefill),
        seq_lens=(*(context,) * num_decodes, prefill),
        label=f"{num_decodes}d@{context} + {prefill}p",
    )


def _shared(batch: int, prefix: int, own: int) -> Workload:
    return Workload(
        phase=WorkloadPhase.SHARED_PREFIX,
        query_lens=(1,) * batch,
        seq_lens=(prefix + own,) * batch,
        shared_prefix_len=prefix,
        label=f"{batch}x({prefix}+{own})",
    )


_BASIC_SETS: dict[str, tuple[Workload, ...]] = {
    "decode": tuple(_decode(b, c) for b in (1, 8, 32) for c in (1024, 4096)),
    "long-decode": (_decode(1, 16384), _decode(8, 16384), _decode(2, 131072)),
    "prefill": (_prefill(1, 512), _prefill(1, 2048), _prefill(1, 4096)),
    "long-prefill": (_prefill(1, 8192), _prefill(1, 16384)),
    "chunked": (_chunked(1, 512, 4096), _chunked(4, 256, 2048)),
    "mixed": (_mixed(6, 4096, 256, 512), _mixed(24, 2048, 1024)),
    "shared-prefix": (_shared(16, 2048, 256),),
}


def _each(workloads: Iterable[Workload], **changes: Any) -> tuple[Workload, ...]:
    return tuple(workload.with_fields(**changes) for workload in workloads)


def _spread(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Return lengths evenly from one to the other, long and short ones next to each other."""
    ranks = (29 * i % count for i in range(count))
    return tuple(shortest + (longest - shortest) * rank // (count - 1) for rank in ranks)


def _ragged(label: str, seq_lens: tuple[int, ...]) -> Workload:
    return Workload(
        phase=WorkloadPhase.DECODE,
        query_lens=(1,) * len(seq_lens),
        seq_lens=seq_lens,
        label=label,
    )


_USUAL = _decode(32, 4096)

_H200_DECODE = (
    *(_decode(1, 1024), _decode(1, 8192), _decode(32, 1024), _USUAL, _decode(64, 4096)),
    *(_decode(128, 2048), _decode(256, 1024), _decode(8, 32768), _decode(2, 131072)),
    _ragged("48 of 100..8000", _spread(48, 100, 8000)),
    _ragged("15x500 + 60000", (*(500,) * 15, 60000)),
)

_H200_SHAPES = (
    *(_USUAL.with_fields(heads=Heads(head_size=size)) for size in (64, 96, 256)),
    _USUAL.with_fields(block_size=64, label="32x4096 page 64"),
    _USUAL.with_fields(kv_cache_dtype="fp8"),
    _decode(32, 1024).with_fields(heads=Heads(num_kv_heads=32)),
    _USUAL.with_fields(heads=Heads(num_kv_heads=2)),
    _USUAL.with_fields(window=1024),
    _USUAL.with_fields(query_lens=(4,) * 32, label="32x4@4096"),
    _USUAL.with_fields(returns_lse=True),
)

_H200_PREFILL = (
    *(_prefill(1, 4096), _prefill(1, 16384), _prefill(8, 2048)),
    *(_chunked(1, 2048, 32048), _mixed(24, 2048, 1024)),
)

_RAGGED_PROMPTS = _spread(16, 40, 4000)

_H200_PROMPTS = (
    Workload(
        phase=WorkloadPhase.PREFILL,
        query_lens=_RAGGED_PROMPTS,
        seq_lens=_RAGGED_PROMPTS,
        label="16 of 40..4000",
    ),
    *(_prefill(32, 512), _prefill(1, 1024)),
    _chunked(1, 2048, 32048).with_fields(block_size=64, label="1x2048@32048 page 64"),
    *(_prefill(1, 4096).with_fields(heads=Heads(head_size=size)) for size in (64, 256)),
    _prefill(1, 16384).with_fields(window=1024),
    _prefill(8, 2048).with_fields(kv_cache_dtype="fp8"),
)

_H200_MIXED = (
    *(_steady(64, 4096, 2048), _steady(64, 4096, 512), _steady(16, 8192, 2048)),
    _mixed(24, 2048, 1024),
)

_H200_OUTPUT = (_decode(1, 1024), _USUAL, _decode(256, 1024), _prefill(8, 2048))

_H200_SETS = {
    "h200-decode": _H200_DECODE,
    "h200-shapes": _H200_SHAPES,
    "h200-prefill": _H200_PREFILL,
    "h200-prompts": _H200_PROMPTS,
    "h200-mixed": _H200_MIXED,
    "h200-output": (*_H200_OUTPUT, *_each(_H200_OUTPUT, own_output=True)),
    "h200-own-output": _each((*_H200_DECODE, *_H200_SHAPES, *_H200_PREFILL), own_output=True),
}
_MLA_DECODE = (_USUAL, _decode(128, 2048), _decode(1, 8192), _decode(8, 32768))
_MLA_PREFILL = (_prefill(1, 4096), _prefill(1, 16384), _prefill(8, 2048))
_MLA_HEADS = (16, 128)
_MLA_SETS = {
    "h200-mla": tuple(
        workload.with_fields(heads=Heads.latents(heads), block_size=64)
        for heads in _MLA_HEADS
        for workload in _MLA_DECODE
    ),
    "h200-mla-prefill": tuple(
        workload.with_fields(heads=Heads.expanded(heads))
        for heads in _MLA_HEADS
        for workload in _MLA_PREFILL
    ),
    "cpu-mla": tuple(
        workload.with_fields(heads=Heads.latents(heads), block_size=128)
        for heads in _MLA_HEADS
        for workload in (_decode(1, 1024), _decode(1, 8192), _decode(8, 1024), _decode(8, 4096))
    ),
    "mla": (
        *_each((_decode(1, 1024), _decode(8, 1024)), heads=Heads.latents(16), block_size=64),
        _decode(8, 1024).with_fields(
            heads=Heads.latents(16), block_size=64, query_lens=(2,) * 8, label="8x2@1024"
        ),
    ),
    "mla-prefill": (_prefill(1, 512).with_fields(heads=Heads.expanded(16)),),
}
_CPU_HEADS = (Heads(), Heads(num_heads=9, num_kv_heads=3, head_size=64))
_CPU_DECODE = tuple(
    _decode(batch, context).with_fields(heads=heads, dtype=dtype, block_size=128)
    for dtype in (torch.bfloat16, torch.float32)
    for heads in _CPU_HEADS
    for batch, context in ((1, 1024), (1, 4096), (1, 16384), (8, 1024), (8, 4096), (32, 1024))
)
_CPU_LARGE = tuple(
    _decode(batch, context).with_fields(heads=heads, dtype=dtype, block_size=128)
    for dtype in (torch.bfloat16, torch.float32)
    for heads in _CPU_HEADS
    for batch, context in ((8, 16384), (32, 4096), (32, 16384))
    # 4 GB of keys and values, and as much for each peer, are more than such a machine has.
    if (dtype, heads.head_size, batch, context) != (torch.float32, 128, 32, 16384)
)
_CPU_USUAL = _decode(8, 4096).with_fields(block_size=128)
_CPU_SHAPES = tuple(
    workload.with_fields(dtype=dtype)
    for dtype in (torch.bfloat16, torch.float32)
    for workload in (
        *(_CPU_USUAL.with_fields(kv_cache_dtype="fp8", heads=heads) for heads in _CPU_HEADS),
        *(_CPU_USUAL.with_fields(heads=Heads(head_size=size)) for size in (96, 192, 256)),
        _CPU_USUAL.with_fields(heads=Heads(num_heads=8)),
        _CPU_USUAL.with_fields(heads=Heads(num_kv_heads=4)),
    )
)
_CPU_MIXED = Workload(
    phase=WorkloadPhase.MIXED,
    query_lens=(*(1,) * 6, 256, 512),
    seq_lens=(4096, 1000, 2333, 777, 3000, 150, 256, 1536),
    label="6d@150..4096 + 256p + 512@1536",
)
_CPU_PREFILL = tuple(
    workload.with_fields(heads=heads, dtype=dtype, block_size=128)
    for dtype in (torch.bfloat16, torch.float32)
    for heads in _CPU_HEADS
    for workload in (
        *(_prefill(1, length) for length in (512, 2048, 4096)),
        _chunked(1, 512, 4096),
        _CPU_MIXED,
    )
)
_CPU_PROMPT = _prefill(1, 2048).with_fields(block_size=128)
_CPU_PREFILL_SHAPES = tuple(
    workload.with_fields(dtype=dtype)
    for dtype in (torch.bfloat16, torch.float32)
    for workload in (
        _CPU_PROMPT.with_fields(window=1024),
        *(_CPU_PROMPT.with_fields(kv_cache_dtype="fp8", heads=heads) for heads in _CPU_HEADS),
        *(_CPU_PROMPT.with_fields(heads=Heads(head_size=size)) for size in (96, 192, 256)),
    )
)
_CPU_SETS = {
    "cpu-decode": _CPU_DECODE,
    "cpu-decode-large": _CPU_LARGE,
    "cpu-shapes": _CPU_SHAPES,
    "cpu-prefill": _CPU_PREFILL,
    "cpu-prefill-shapes": _CPU_PREFILL_SHAPES,
    "cpu-mla-prefill": tuple(
        _prefill(1, length).with_fields(heads=Heads.expanded(16), dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for length in (512, 2048)
    ),
}
_FULL = ("decode", "prefill", "chunked", "mixed", "shared-prefix")

SETS: Mapping[str, tuple[Workload, ...]] = MappingProxyType(
    {
        **_BASIC_SETS,
        **_H200_SETS,
        **_MLA_SETS,
        **_CPU_SETS,
        "quick": (_decode(1, 1024), _decode(8, 1024), _prefill(1, 512), _mixed(6, 1024, 256)),
        "full": tuple(workload for name in _FULL for workload in _BASIC_SETS[name]),
    }
)
"""Workloads by the name of their set, for a layer of 32/8x128 in bfloat16 where none is named.

The sets named for the H200 fill such a device; they are what the targets of the GPU backends are
stated for, as those named for a CPU are for CPU_ATTN's. h200-own-output holds the H200's batches,
into the call's own tensor. Those of latent attention have decodes, for MLA backends, and prefills,
for MLA prefills, apart.
"""


def workload_set(names: Iterable[str]) -> tuple[Workload, ...]:
    """Return the workloads of these sets, in order, each once.

    Raises:
        UnknownNameError: a set of that name does not exist.
    """
    found: dict[Workload, None] = {}
    for name in names:
        if name not in SETS:
            raise UnknownNameError.for_name("workload", name, SETS)
        found.update(dict.fromkeys(SETS[name]))
    return tuple(found)
