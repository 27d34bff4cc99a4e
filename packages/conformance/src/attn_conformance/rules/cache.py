"""The paged cache: what is written, where blocks lie, and how far."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from attn_conformance.batch import Batch
from attn_conformance.case import Case, TableStyle
from attn_conformance.checks import (
    answer_of,
    check_cache,
    check_numbers,
    check_numbers_or_refusal,
)
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import over_shapes
from attn_conformance.subject import Subject
from attn_shared.capability import Reason
from attn_shared.dtypes import KVCacheLayout
from attn_shared.request import AttentionType

__all__ = ["FORMATS", "RULES", "fits_memory"]

FORMATS = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e5m2", "int8_per_token_head")
"""Formats of a cache that torch alone can write, so that a backend's writing can be checked."""

_FAR = 2**31  # elements that a signed 32-bit offset cannot reach
_BLOCK_SIZES = (1, 2, 8, 16, 32, 48, 64, 128, 256)


def _written(depth: Depth, fit: Fit) -> Iterator[Case]:
    for layout in KVCacheLayout:
        for kv_cache_dtype in FORMATS:
            scales = {"k_scale": 0.5, "v_scale": 2.0} if kv_cache_dtype.startswith("fp8") else {}
            yield from over_shapes(
                fit,
                depth,
                f"{layout}-{kv_cache_dtype}",
                names=("mixed",),
                layout=layout,
                kv_cache_dtype=kv_cache_dtype,
                num_padding_rows=1,
                **scales,
            )
        yield from over_shapes(
            fit,
            depth,
            f"{layout}-wide-values",
            names=("mixed",),
            layout=layout,
            head_size_v=2 * fit.head_size,
        )
        yield from over_shapes(
            fit, depth, f"{layout}-padded", names=("extend",), layout=layout, block_padding=8
        )
    per_head = {"k_scale": (0.5, 2.0), "v_scale": (2.0, 0.25), "kv_cache_dtype": "fp8"}
    yield from over_shapes(fit, depth, "fp8-per-head", names=("mixed",), **per_head)
    cross = AttentionType.ENCODER_DECODER
    yield fit.case("cross", (1, 3), (5, fit.block_size + 1), attn_type=cross)


def _check_written(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    engine = subject.engine(batch)
    if subject.backend.forward_includes_kv_cache_update:
        engine.forward(batch, engine.plan(batch))
    else:
        engine.write(batch)
    check_cache(batch)


def _unwritten(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.case("padded-requests", (1, 2, 3), (n + 1, 0, 0))
    yield fit.case("every-other", (n + 1, 3), (2 * n, 3), variant="every other")
    yield fit.case("none", (2, 3), (n, 3), variant="none")
    yield fit.case("fp8", (4, 3), (n, 3), variant="every other", kv_cache_dtype="fp8")
    yield fit.case(
        "int8", (4, 3), (n, 3), variant="every other", kv_cache_dtype="int8_per_token_head"
    )


def _check_unwritten(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    step = {"every other": 2, "none": 1}.get(case.variant)
    if step is not None:
        batch = _without_slots(batch, step)
    subject.engine(batch).write(batch)
    check_cache(batch)


def _without_slots(batch: Batch, step: int) -> Batch:
    """Return the batch with each step-th slot -1, and the cache as it is then expected."""
    slots, before = batch.common.slot_mapping, batch.kv_cache
    spec, written = batch.spec.kv_cache_spec, batch.written_cache
    if slots is None or before is None or written is None:
        raise TypeError("the cases of this rule write a cache")
    slots = slots.clone()
    dropped = slots[::step].tolist()
    slots[::step] = -1
    ours, old = spec.split(written), spec.split(before)  # type: ignore[union-attr]
    for slot in dropped:
        block, offset = divmod(slot, batch.case.block_size)
        for target, source in zip(ours, old, strict=True):
            if target is not None:
                _raw(target)[block, offset] = _raw(source)[block, offset]
    return replace(batch, common=batch.common.with_fields(slot_mapping=slots))


def _raw(view: torch.Tensor) -> torch.Tensor:
    return view.view(torch.uint8) if view.dtype.itemsize == 1 else view


def _writes_apart(subject: Subject, case: Case) -> tuple[Reason, ...]:
    """The update alone can be looked at only where it is a call of its own."""
    if subject.backend.forward_includes_kv_cache_update:
        return (
            Reason(code="forward_includes_kv_cache_update", value="True", allowed="False here"),
        )
    return subject.excluded(case)


def _ordered(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, names=("decode", "mixed"), table=TableStyle.ORDERED)
    n = fit.block_size
    yield fit.case("one-token", (1,), (1,), table=TableStyle.ORDERED)
    yield fit.case("one-block", (n,), (n,), table=TableStyle.ORDERED)


def _padded(depth: Depth, fit: Fit) -> Iterator[Case]:
    for layout in KVCacheLayout:
        yield from over_shapes(fit, depth, str(layout), block_padding=8, layout=layout)
    yield from over_shapes(
        fit, depth, "int8", block_padding=8, kv_cache_dtype="int8_per_token_head", names=("mixed",)
    )


def _tables(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for style in (TableStyle.SHUFFLED, TableStyle.SHARED_PREFIX, TableStyle.REPEATED):
        lens = ((1, 1, 3), (3 * n + 1, 5 * n, 4 * n - 1))
        yield fit.case(f"{style}-lengths", *lens, table=style)
        yield from over_shapes(fit, depth, style, table=style, seed=1)


def _freed(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for left in (n - 1, n, 2 * n + 1)[: 1 if depth is Depth.QUICK else 3]:
        window = {"window": (left, 0), "table": TableStyle.FREED_LEFT}
        yield fit.case(f"decode-{left}", (1, 1), (5 * n, 3 * n + 1), **window)
        yield fit.case(f"extend-{left}", (3, 1), (5 * n, 4 * n + 1), **window)


def _block_sizes(depth: Depth, fit: Fit) -> Iterator[Case]:
    preferred = fit.capability.preferred_block_size
    for size in dict.fromkeys((*_BLOCK_SIZES, preferred)):
        lens = ((1, 1, size + 1), (size + 1, 2 * size, size + 1))
        yield fit.case(f"{size}", *lens, block_size=size)


def _layouts(depth: Depth, fit: Fit) -> Iterator[Case]:
    for layout in KVCacheLayout:
        yield from over_shapes(fit, depth, str(layout), layout=layout)
        yield fit.case(f"{layout}-one-kv-head", (1, 3), (5, 7), layout=layout, num_kv_heads=1)


def _far(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    half = next((d for d in (torch.bfloat16, torch.float16) if d in fit.capability.dtypes), None)
    common = {"dtype": half or fit.dtype, "cache_elements": _FAR, "num_heads": 2}
    yield fit.case("many-blocks", (1, 3), (2 * n + 1, n), **common)
    yield fit.case(
        "wide-blocks", (1,), (n + 1,), **{**common, "cache_elements": 1, "block_padding": 2**30}
    )


def fits_memory(subject: Subject, case: Case) -> tuple[Reason, ...]:
    """Excluded where such a cache cannot be had: memory that nobody touches costs nothing on Linux.

    A device's memory is taken whole, and there are two caches.
    """
    excluded = subject.excluded(case)
    if excluded:
        return excluded
    elements = max(case.cache_elements, case.block_padding * 4) * 1.25
    needed = int(elements * case.dtype.itemsize) * (1 if subject.device.type == "cpu" else 2)
    available = subject.facts.memory_bytes or 0
    if subject.device.type == "cpu" and not sys.platform.startswith("linux"):
        available = 0
    if needed <= available:
        return ()
    return (Reason(code="memory", value=f"{needed} bytes", allowed=f"at most {available} bytes"),)


def _check_far(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    engine = subject.engine(batch)
    answer = answer_of(subject, batch)
    answer.hold(engine.run(batch))
    check_cache(batch)
    if subject.returns_lse_of(case):
        answer.hold(engine.run(batch, with_lse=True), "with LSE")


RULES = (
    Rule(
        name="cache_update",
        contract="New tokens are stored byte for byte as the format says, in each layout.",
        make=_written,
        check=_check_written,
    ),
    Rule(
        name="slot_minus_one",
        contract="A slot of -1 is not written, and nothing else is in its stead.",
        make=_unwritten,
        check=_check_unwritten,
        excluded=_writes_apart,
    ),
    Rule(
        name="block_zero",
        contract="Block 0 is an ordinary block.",
        make=_ordered,
        check=check_numbers,
    ),
    Rule(
        name="padded_blocks",
        contract="A padded block stride works or is refused.",
        make=_padded,
        check=check_numbers_or_refusal,
    ),
    Rule(
        name="page_tables",
        contract="Rows name blocks in any order, share them, and repeat them.",
        make=_tables,
        check=check_numbers,
    ),
    Rule(
        name="freed_blocks",
        contract="Entries wholly left of the window may name any block with finite numbers.",
        make=_freed,
        check=check_numbers,
    ),
    Rule(
        name="block_sizes",
        contract="Every block size that the capability takes is right.",
        make=_block_sizes,
        check=check_numbers,
    ),
    Rule(
        name="layouts",
        contract="Every layout that the capability takes is right.",
        make=_layouts,
        check=check_numbers,
    ),
    Rule(
        name="far_blocks",
        contract="Offsets into the cache are 64-bit.",
        make=_far,
        check=_check_far,
        excluded=fits_memory,
    ),
)
