"""Batches drawn from all that a capability takes.

The numbers come from `random.Random` and a seed, so that a capability has the same cases on every
machine: kernels that are compiled ahead for them are those that they will ask for. (Hypothesis,
even derandomised, also draws constants that it finds in the code of whatever is imported.)
"""

from __future__ import annotations

import random
from typing import Any

import torch

from attn_conformance.case import Case, TableStyle
from attn_conformance.fit import Fit
from attn_conformance.rules._shapes import TYPICAL
from attn_conformance.rules.heads import HEAD_SIZES, RATIOS
from attn_shared.capability import Support

__all__ = ["drawn_cases"]

_BLOCK_SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
_LONGEST = 600
_WIDE = 80  # from this head size on float32 batches get a typical request
_FP8_SCALES = (0.25, 0.5, 1.0, 3.0)
_SEED = 4
_TRIES_PER_CASE = 3  # a narrow capability repeats itself


def drawn_cases(fit: Fit, count: int) -> list[Case]:
    """Draw up to `count` different cases, the same ones every time, named by their number.

    Each becomes a case of its own, instead of one test that ends at its first failure.
    """
    draw = random.Random(_SEED)
    found: list[Case] = []
    for _ in range(_TRIES_PER_CASE * count):
        case = _batch(draw, fit)
        if case not in found:
            found.append(case)
        if len(found) == count:
            break
    return [case.with_fields(name=str(index)) for index, case in enumerate(found)]


def _lengths(draw: random.Random, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw decodes, extends, prompts and padding, in lengths around multiples of a block."""
    query_lens, seq_lens = [], []
    for _ in range(draw.randint(1, 6)):
        new = draw.choice(
            (1, draw.randint(0, 5), draw.randint(1, 2 * min(block_size, 32) + 1)),
        )
        old = draw.choice(
            (
                0,
                draw.randint(0, min(_LONGEST, 4 * block_size)),
                min(_LONGEST, draw.randint(1, 4) * block_size),
            )
        )
        is_padding = draw.randrange(10) == 0
        query_lens.append(new)
        seq_lens.append(0 if is_padding else new + old)
    return tuple(query_lens), tuple(seq_lens)


def _batch(draw: random.Random, fit: Fit) -> Case:
    """Draw a case that a capability takes, as far as single fields tell."""
    capability = fit.capability
    sizes = [size for size in _BLOCK_SIZES if capability.accepts_block_size(size)]
    block_size = draw.choice(sizes or [fit.block_size])
    query_lens, seq_lens = _lengths(draw, block_size)
    heads = [size for size in HEAD_SIZES if size in capability.head_sizes]
    ratio, kv_heads = draw.choice(RATIOS), draw.randint(1, 3)
    head_size = draw.choice([fit.head_size, *heads])
    fields: dict[str, Any] = {
        "block_size": block_size,
        "head_size": head_size,
        # Logits of a usual size: of larger ones the budget is a matter of luck in a small batch.
        "scale": draw.choice((None, round(1.5 * head_size**-0.5, 4))),
        "head_size_v": draw.choice(_value_sizes(fit, head_size)),
        "num_heads": ratio * kv_heads,
        "num_kv_heads": kv_heads,
        "layout": draw.choice(list(capability.kv_layouts) or [fit.layout]),
        "dtype": draw.choice(sorted(capability.dtypes, key=str) or [fit.dtype]),
        "table": draw.choice(list(TableStyle)),
        "num_padding_rows": draw.randint(0, 2),
        "seed": draw.randint(0, 9),
        **_cache(draw, fit, kv_heads),
        **_options(draw, fit, len(query_lens), block_size),
    }
    if fields["dtype"] is torch.float32 and head_size >= _WIDE:
        query_lens, seq_lens = (*query_lens, TYPICAL[0]), (*seq_lens, TYPICAL[1])
        if isinstance(fields.get("causal"), tuple):
            fields["causal"] += (True,)
    return fit.case("generated", query_lens, seq_lens, **fields)


def _value_sizes(fit: Fit, head_size: int) -> list[int | None]:
    """Return None, for equal widths, and the widths beside it that are served."""
    sizes = fit.capability.head_sizes_v
    wanted = (head_size, head_size // 2, 32)
    return [None, *(size for size in wanted if sizes is not None and size in sizes)]


def _cache(draw: random.Random, fit: Fit, kv_heads: int) -> dict[str, Any]:
    capability = fit.capability
    known = ("auto", "fp8", "fp8_e5m2", "int8_per_token_head")
    formats = [name for name in known if name in capability.kv_cache_dtypes]
    name = draw.choice(formats or [fit.kv_cache_dtype])
    if not name.startswith("fp8"):
        return {"kv_cache_dtype": name}
    is_per_head = draw.random() < 0.5 and capability.per_head_quant_scales is not Support.NO

    def scale() -> float | tuple[float, ...]:
        if is_per_head:
            return tuple(draw.choices(_FP8_SCALES, k=kv_heads))
        return draw.choice(_FP8_SCALES)

    return {"kv_cache_dtype": name, "k_scale": scale(), "v_scale": scale()}


def _options(draw: random.Random, fit: Fit, num_reqs: int, block_size: int) -> dict[str, Any]:
    """Draw a few of the features that are served."""
    offered: dict[str, tuple[str, Any]] = {
        "sinks": ("has_sinks", True),
        "alibi": ("has_alibi", True),
        "softcap": ("softcap", draw.choice((0.7, 3.0))),
        "window": ("window", (draw.randint(0, 2 * block_size), 0)),
        "non_causal": ("causal", False),
        "per_request_causal": ("causal", tuple(draw.choices((True, False), k=num_reqs))),
    }
    chosen: dict[str, Any] = {}
    for feature, (field, value) in offered.items():
        is_drawn = draw.randrange(4) == 0
        if is_drawn and getattr(fit.capability, feature) is not Support.NO:
            chosen[field] = value
    return chosen
