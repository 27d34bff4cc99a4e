"""The cache of latents: what is written, how it is quantised, and what nobody may read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attn_conformance._caches import differing_blocks
from attn_conformance.case import Case, TableStyle
from attn_conformance.checks import REFUSALS, require
from attn_conformance.fit import Fit
from attn_conformance.mla_batch import MLABatch
from attn_conformance.mla_engine import check_mla_numbers, hold, mla_batch, mla_engine
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules.cache import fits_memory
from attn_conformance.subject import Subject

__all__ = ["RULES"]

_FORMATS = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e5m2")
_FAR = 2**31  # elements that a signed 32-bit offset cannot reach
_BLOCK_SIZES = (1, 2, 8, 16, 32, 48, 64, 128, 256)


def _written(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for name in _FORMATS:
        scale = 0.05 if name.startswith("fp8") else 1.0
        yield fit.mla_case(
            name,
            (1, 1, n + 9),
            (2 * n, n, 2 * n + 9),
            kv_cache_dtype=name,
            k_scale=scale,
            num_padding_rows=2,
        )
    yield fit.mla_case("padded-requests", (1, 2, 3), (n + 1, 0, 0))
    yield fit.mla_case("ordered", (1, 3), (1, n), table=TableStyle.ORDERED)


def _check_written(subject: Subject, case: Case) -> None:
    """All slots, and then all but every other."""
    for keeps_all in (True, False):
        batch = mla_batch(subject, case)
        expected = batch.written_cache
        if not keeps_all:
            batch, expected = _without_slots(batch)
        mla_engine(subject, batch).write(batch)
        blocks = differing_blocks(batch.kv_cache, expected, batch.placement)
        require(
            not blocks,
            f"the cache differs in blocks {blocks} from what attn_shared.kv_write stores in {case}",
        )


def _without_slots(batch: MLABatch) -> tuple[MLABatch, torch.Tensor]:
    """Return the batch with every other slot -1, and the cache as it is then expected."""
    slots = batch.common.slot_mapping
    if slots is None:
        raise TypeError("the cases of this rule write a cache")
    slots = slots.clone()
    dropped = [slot for slot in slots[::2].tolist() if slot >= 0]
    slots[::2] = -1
    expected = batch.written_cache
    for slot in dropped:
        block, offset = divmod(slot, batch.case.block_size)
        _raw(expected)[block, offset] = _raw(batch.kv_cache)[block, offset]
    return replace(batch, common=batch.common.with_fields(slot_mapping=slots)), expected


def _raw(view: torch.Tensor) -> torch.Tensor:
    return view.view(torch.uint8) if view.dtype.itemsize == 1 else view


def _formats(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    lens = ((1, 1, 20, n + 9), (3 * n, n + 1, 20 + 2 * n, n + 9))
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        for scale in (0.02, 1.0):
            yield fit.mla_case(f"{name}-{scale}", *lens, kv_cache_dtype=name, k_scale=scale)
        yield fit.mla_case(f"{name}-tensor", *lens, kv_cache_dtype=name, k_scale=(0.03,))
    half = next((d for d in (torch.bfloat16, torch.float16) if d in fit.capability.dtypes), None)
    if half is not None:
        yield fit.mla_case("half", *lens, kv_cache_dtype="fp8", k_scale=0.02, dtype=half)


def _is_format(subject: Subject, case: Case) -> tuple[object, ...]:
    """A scale in a tensor of one is a scale per tensor, whatever the request calls it."""
    request = case.request.with_options(per_head_quant_scales=False)
    return subject.capability.check(request, subject.facts)


def _padded(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("decode", (1, 1, 1), (2 * n, 0, n + 1))
    yield fit.mla_case("all", (1, 1), (0, 0))
    yield fit.mla_case("drafts", (2, 2, 2), (0, 3 * n, n + 2))
    yield fit.mla_case("prefill", (20, 17, n + 9), (20 + n, 0, n + 9))
    yield fit.mla_case("fp8", (1, 1, 20), (2 * n, 0, 20 + n), kv_cache_dtype="fp8", k_scale=0.02)


def _empty(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield fit.mla_case("no-requests", (), ())
    yield fit.mla_case("no-tokens", (0, 0), (5, 0))


def _unread(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    lens = ((1, 1, 2, 20), (2 * n + 1, 1, 3 * n - 1, 20 + n))
    yield fit.mla_case("tails", *lens)
    yield fit.mla_case("padding-rows", *lens, num_padding_rows=3)
    yield fit.mla_case("decode-padding", (1, 1), (n + 1, 3 * n - 1), num_padding_rows=4)
    yield fit.mla_case("repeated", *lens, table=TableStyle.REPEATED)
    yield fit.mla_case("shared", *lens, table=TableStyle.SHARED_PREFIX)
    yield fit.mla_case("fp8", *lens, kv_cache_dtype="fp8", k_scale=0.02)


def _strided(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    lens = ((1, 1, 20), (2 * n + 1, n, 20 + n))
    for padding in (8, 3):
        yield fit.mla_case(f"{padding}", *lens, block_padding=padding)


def _check_strided(subject: Subject, case: Case) -> None:
    try:
        check_mla_numbers(subject, case)
    except REFUSALS as error:
        require(bool(str(error)), f"refused without a word: {type(error).__name__}")


def _sizes(depth: Depth, fit: Fit) -> Iterator[Case]:
    preferred = fit.capability.preferred_block_size
    for size in dict.fromkeys((*_BLOCK_SIZES, preferred)):
        lens = ((1, 1, size + 9), (size + 1, 2 * size, 2 * size + 9))
        yield fit.mla_case(f"{size}", *lens, block_size=size)


def _far(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    half = next((d for d in (torch.bfloat16, torch.float16) if d in fit.capability.dtypes), None)
    common = {"dtype": half or fit.dtype, "cache_elements": _FAR}
    yield fit.mla_case("decode", (1, 1), (2 * n + 1, n), **common)
    yield fit.mla_case("extend", (1, 20), (n, 20 + 2 * n), **common)


def _check_far(subject: Subject, case: Case) -> None:
    batch = mla_batch(subject, case)
    hold(mla_engine(subject, batch).run(batch))


RULES = (
    Rule(
        name="mla_cache_update",
        contract="A latent and its rope part are one entry, byte for byte; -1 is not written.",
        make=_written,
        check=_check_written,
    ),
    Rule(
        name="mla_fp8",
        contract="An fp8 cache is read as stored * scale, the step's own tokens included.",
        make=_formats,
        check=check_mla_numbers,
        excluded=_is_format,  # type: ignore[arg-type]
    ),
    Rule(
        name="mla_padded_requests",
        contract="A request without keys has output 0 and LSE -inf.",
        make=_padded,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_empty_batch",
        contract="A batch without requests, or without tokens, is an ordinary one.",
        make=_empty,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_unread",
        contract="Nothing is read of tails, nobody's blocks, padding rows and spare table entries.",
        make=_unread,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_padded_blocks",
        contract="A padded block stride works or is refused.",
        make=_strided,
        check=_check_strided,
    ),
    Rule(
        name="mla_block_sizes",
        contract="Every block size that the capability takes is right.",
        make=_sizes,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_far_blocks",
        contract="Offsets into the cache are 64-bit.",
        make=_far,
        check=_check_far,
        excluded=fits_memory,
    ),
)
