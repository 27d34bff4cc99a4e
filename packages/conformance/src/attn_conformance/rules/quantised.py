"""Quantised caches: scales, flavours, and new tokens read as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attn_conformance.case import Case
from attn_conformance.checks import check_numbers, check_numbers_or_refusal
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import over_shapes
from attn_conformance.rules.cache import FORMATS

__all__ = ["RULES"]

_E4M3 = ("fp8", "fp8_e4m3")
_PER_HEAD: dict[str, Any] = {"k_scale": (0.25, 3.0), "v_scale": (4.0, 0.5)}


def _formats(depth: Depth, fit: Fit) -> Iterator[Case]:
    for name in FORMATS:
        yield from over_shapes(fit, depth, name, kv_cache_dtype=name)


def _scaled(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Scales far from 1 and from each other, so that none can stand for the other."""
    for name in (*_E4M3, "fp8_e5m2"):
        for k_scale, v_scale in ((0.25, 3.0), (2.0, 0.5), (1.0, 4.0)):
            fields: dict[str, Any] = {
                "kv_cache_dtype": name,
                "k_scale": k_scale,
                "v_scale": v_scale,
            }
            yield from over_shapes(
                fit, depth, f"{name}-{k_scale}-{v_scale}", names=("mixed",), **fields
            )


def _saturating(depth: Depth, fit: Fit) -> Iterator[Case]:
    """With a scale this small the largest entries do not fit; they saturate, and are no NaN."""
    for name in (*_E4M3, "fp8_e5m2"):
        scale = 2**-9 if name != "fp8_e5m2" else 2**-16
        fields: dict[str, Any] = {"kv_cache_dtype": name, "k_scale": scale, "v_scale": scale}
        yield from over_shapes(fit, depth, name, names=("mixed",), **fields)


def _per_head(depth: Depth, fit: Fit) -> Iterator[Case]:
    for name in (*_E4M3, "fp8_e5m2"):
        yield from over_shapes(fit, depth, name, kv_cache_dtype=name, **_PER_HEAD)


def _fnuz(depth: Depth, fit: Fit) -> Iterator[Case]:
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        fields: dict[str, Any] = {
            "kv_cache_dtype": "fp8",
            "fp8_e4m3_dtype": dtype,
            "k_scale": 0.5,
            "v_scale": 2.0,
        }
        yield from over_shapes(fit, depth, str(dtype).removeprefix("torch."), **fields)


def _int8(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, kv_cache_dtype="int8_per_token_head")
    odd: dict[str, Any] = {"head_size": 33, "kv_cache_dtype": "int8_per_token_head"}
    yield from over_shapes(fit, depth, "odd-head-size", names=("mixed",), **odd)


def _fresh(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Prompts without a computed token: all that is read is new."""
    n = fit.block_size
    for name in ("fp8", "fp8_e5m2", "int8_per_token_head"):
        yield fit.case(name, (n + 1, 2), (n + 1, 2), kv_cache_dtype=name)
        yield fit.case(f"decode-{name}", (1, 1), (1, 2), kv_cache_dtype=name)


RULES = (
    Rule(
        name="cache_formats",
        contract="Every format of a cache that the capability takes is right.",
        make=_formats,
        check=check_numbers,
    ),
    Rule(
        name="fp8_scales",
        contract="fp8: stored = value / scale, read back * scale, for keys and for values.",
        make=_scaled,
        check=check_numbers,
    ),
    Rule(
        name="fp8_saturates",
        contract="A value beyond the fp8 range saturates.",
        make=_saturating,
        check=check_numbers,
    ),
    Rule(
        name="fp8_scales_per_head",
        contract="Scales may be per kv head.",
        make=_per_head,
        check=check_numbers,
    ),
    Rule(
        name="fp8_flavours",
        contract="e4m3fn and e4m3fnuz are read as what the spec says, or refused.",
        make=_fnuz,
        check=check_numbers_or_refusal,
    ),
    Rule(
        name="int8",
        contract="int8 per token and head: symmetric, its float32 scale beside each entry.",
        make=_int8,
        check=check_numbers,
    ),
    Rule(
        name="new_tokens_as_stored",
        contract="With a quantised cache new tokens are read as stored, or fresh if so declared.",
        make=_fresh,
        check=check_numbers,
    ),
)
