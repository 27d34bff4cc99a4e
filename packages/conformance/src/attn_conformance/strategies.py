"""Hypothesis strategies: batches from all that a capability takes.

A module of its own, imported where cases are drawn: Hypothesis takes a while to import.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attn_conformance.case import Case, TableStyle
from attn_conformance.fit import Fit
from attn_conformance.rules._shapes import TYPICAL
from attn_conformance.rules.heads import HEAD_SIZES, RATIOS
from attn_shared.capability import Support

__all__ = ["batches", "drawn_cases"]

_BLOCK_SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
_LONGEST = 600
_WIDE = 80  # from this head size on float32 batches get a typical request
_FP8_SCALES = st.sampled_from((0.25, 0.5, 1.0, 3.0))


def drawn_cases(fit: Fit, count: int) -> list[Case]:
    """Draw up to `count` different cases, the same ones every time, named by their number.

    Each becomes a case of its own, instead of one test that ends at its first failure.
    """
    found: list[Case] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(batches(fit))
    def collect(case: Case) -> None:
        if case not in found:
            found.append(case)

    collect()
    return [case.with_fields(name=str(index)) for index, case in enumerate(found)]


@st.composite
def _lengths(draw: st.DrawFn, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw decodes, extends, prompts and padding, in lengths around multiples of a block."""
    computed = st.one_of(
        st.just(0),
        st.integers(0, min(_LONGEST, 4 * block_size)),
        st.integers(1, 4).map(lambda count: min(_LONGEST, count * block_size)),
    )
    query = st.one_of(st.just(1), st.integers(0, 5), st.integers(1, 2 * min(block_size, 32) + 1))
    rows = draw(st.lists(st.tuples(query, computed, st.integers(0, 9)), min_size=1, max_size=6))
    lens = [(new, 0 if padding == 0 else new + old) for new, old, padding in rows]
    return tuple(new for new, _ in lens), tuple(length for _, length in lens)


@st.composite
def batches(draw: st.DrawFn, fit: Fit) -> Case:
    """Draw a case that a capability takes, as far as single fields tell."""
    capability = fit.capability
    sizes = [size for size in _BLOCK_SIZES if capability.accepts_block_size(size)]
    block_size = draw(st.sampled_from(sizes or [fit.block_size]))
    query_lens, seq_lens = draw(_lengths(block_size))
    heads = [size for size in HEAD_SIZES if size in capability.head_sizes]
    ratio, kv_heads = draw(st.sampled_from(RATIOS)), draw(st.integers(1, 3))
    head_size = draw(st.sampled_from([fit.head_size, *heads]))
    fields: dict[str, Any] = {
        "block_size": block_size,
        "head_size": head_size,
        # Logits of a usual size: of larger ones the budget is a matter of luck in a small batch.
        "scale": draw(st.sampled_from((None, round(1.5 * head_size**-0.5, 4)))),
        "head_size_v": draw(st.sampled_from(_value_sizes(fit, head_size))),
        "num_heads": ratio * kv_heads,
        "num_kv_heads": kv_heads,
        "layout": draw(st.sampled_from(list(capability.kv_layouts) or [fit.layout])),
        "dtype": draw(st.sampled_from(sorted(capability.dtypes, key=str) or [fit.dtype])),
        "table": draw(st.sampled_from(list(TableStyle))),
        "num_padding_rows": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 9)),
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


def _cache(draw: st.DrawFn, fit: Fit, kv_heads: int) -> dict[str, Any]:
    capability = fit.capability
    known = ("auto", "fp8", "fp8_e5m2", "int8_per_token_head")
    formats = [name for name in known if name in capability.kv_cache_dtypes]
    name = draw(st.sampled_from(formats or [fit.kv_cache_dtype]))
    if not name.startswith("fp8"):
        return {"kv_cache_dtype": name}
    scales = _FP8_SCALES
    if capability.per_head_quant_scales is not Support.NO and draw(st.booleans()):
        per_head = st.tuples(*[_FP8_SCALES] * kv_heads)
        return {"kv_cache_dtype": name, "k_scale": draw(per_head), "v_scale": draw(per_head)}
    return {"kv_cache_dtype": name, "k_scale": draw(scales), "v_scale": draw(scales)}


def _options(draw: st.DrawFn, fit: Fit, num_reqs: int, block_size: int) -> dict[str, Any]:
    """Draw a few of the features that are served."""
    flags = st.lists(st.booleans(), min_size=num_reqs, max_size=num_reqs).map(tuple)
    offered: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
        "sinks": ("has_sinks", st.just(True)),
        "alibi": ("has_alibi", st.just(True)),
        "softcap": ("softcap", st.sampled_from((0.7, 3.0))),
        "window": ("window", st.tuples(st.integers(0, 2 * block_size), st.just(0))),
        "non_causal": ("causal", st.just(False)),
        "per_request_causal": ("causal", flags),
    }
    chosen: dict[str, Any] = {}
    for feature, (field, values) in offered.items():
        is_served = getattr(fit.capability, feature) is not Support.NO
        if is_served and draw(st.integers(0, 3)) == 0:
            chosen[field] = draw(values)
    return chosen
