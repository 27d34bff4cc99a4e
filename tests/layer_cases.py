"""The cases of test_context_parallel_layer: one step of a layer each, on two or four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_shared.request import AttentionRequest
from attn_shared.selection import Policy, VerdictStatus
from attn_shared.selector import DEFAULT_SELECTOR

BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step of a layer."""

    dcp: int = 2
    pcp: int = 1
    interleave: int = 1
    combine: str | None = None
    backend: str = "TORCH_SDPA"
    dtype: torch.dtype = torch.float32
    heads: int = 2
    kv_heads: int = 1
    width: int = 16
    width_v: int | None = None
    query_lens: tuple[int, ...] = (1, 1, 1, 1, 1)
    seq_lens: tuple[int, ...] = (1, 5, 33, 70, 0)
    window: int | None = None
    sinks: bool = False
    alibi: bool = False
    causal: bool | tuple[bool, ...] = True
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    k_scale: float = 1.0
    has_exact_lengths: bool = True
    host_lengths_exceed_by: int = 0
    checked: bool = False
    reads_cache_only: bool = False
    options: dict[str, Any] = field(default_factory=dict)


RAGGED = Case(query_lens=(1, 3, 40, 1, 0, 9), seq_lens=(18, 3, 61, 0, 0, 100))
SPECULATIVE = Case(query_lens=(4, 4, 4), seq_lens=(4, 39, 90))
PREFILL = Case(query_lens=(70, 5, 150), seq_lens=(70, 5, 333))


def _placements() -> Iterator[tuple[str, Case]]:
    for dcp in (2, 4):
        for interleave in (1, 4, 16):
            for combine in ("ag_rs", "a2a"):
                place: dict[str, Any] = {"dcp": dcp, "interleave": interleave, "combine": combine}
                name = f"{dcp} {interleave} {combine}"
                yield f"decode {name}", Case(**place)
                yield f"speculative {name}", replace(SPECULATIVE, **place)
                yield f"ragged {name}", replace(RAGGED, **place)
            yield f"prefill {dcp} {interleave}", replace(PREFILL, dcp=dcp, interleave=interleave)


def _features() -> Iterator[tuple[str, Case]]:
    features: dict[str, dict[str, Any]] = {
        "window": {"window": 7},
        "wide window": {"window": 40},
        "one key": {"window": 1},
        "sinks": {"sinks": True},
        "sinks and window": {"sinks": True, "window": 20},
        "softcap": {"options": {"softcap": 0.7}},
        "groups": {"heads": 6, "kv_heads": 2},
        "kv heads": {"heads": 3, "kv_heads": 3},
        "other values": {"width_v": 24},
        "bfloat16": {"dtype": torch.bfloat16},
        "float16": {"dtype": torch.float16, "sinks": True},
        "fp8": {"options": {"kv_cache_dtype": "fp8"}, "dtype": torch.bfloat16, "k_scale": 0.5},
        "int8": {
            "options": {"kv_cache_dtype": "int8_per_token_head"},
            "dtype": torch.bfloat16,
        },
        "HND": {"options": {"kv_layout": "HND"}, "kv_heads": 2},
        "NHD": {"options": {"kv_layout": "NHD"}, "kv_heads": 2},
        "invariant": {"options": {"batch_invariant": True}},
        "checked": {"checked": True},
        "read only": {"reads_cache_only": True},
        "connector": {"options": {"use_kv_connector": True}},
    }
    for name, fields in features.items():
        for interleave in (1, 4):
            yield (
                f"{name}, interleave {interleave}",
                replace(RAGGED, interleave=interleave, **fields),
            )
    yield "window over 4", replace(RAGGED, dcp=4, window=20, interleave=16)
    yield "sinks by a2a", replace(RAGGED, dcp=4, sinks=True, combine="a2a", interleave=4)
    yield "alibi", replace(RAGGED, alibi=True)
    yield "alibi over 4", replace(RAGGED, alibi=True, dcp=4, kv_heads=2)
    yield "alibi and window", replace(RAGGED, alibi=True, window=20, sinks=True)


def _rules_of_causality() -> Iterator[tuple[str, Case]]:
    plain: dict[str, Any] = {"options": {"non_causal": True}, "causal": False}
    for interleave in (1, 4):
        place: dict[str, Any] = {"interleave": interleave}
        yield f"non-causal {interleave}", replace(RAGGED, **place, **plain)
        flags = (True, False, False, True, True, True)
        mixed: dict[str, Any] = {"options": {"per_request_causal": True}, "causal": flags}
        yield f"per request {interleave}", replace(RAGGED, **place, **mixed)
        ranges = {1: [(0, 1)], 2: [(30, 50), (52, 60)], 5: [(3, 9), (95, 97)]}
        prefix: dict[str, Any] = {"options": {"use_mm_prefix": True}, "ranges": ranges}
        yield f"ranges {interleave}", replace(RAGGED, **place, **prefix)


def _splits() -> Iterator[tuple[str, Case]]:
    place: dict[str, Any]
    for pcp in (2, 4):
        place = {"dcp": 1, "pcp": pcp}
        yield f"split ragged {pcp}", replace(RAGGED, **place)
        yield f"split prefill {pcp}", replace(PREFILL, **place)
        yield f"split decode {pcp}", Case(**place)
        yield f"split one {pcp}", Case(**place, query_lens=(1,), seq_lens=(9,))
    place = {"dcp": 1, "pcp": 2}
    everything: dict[str, Any] = {"window": 20, "sinks": True, "alibi": True, "kv_heads": 2}
    yield "split with features", replace(RAGGED, **place, **everything)
    yield "split checked", replace(RAGGED, **place, checked=True)
    yield "split chunks", replace(RAGGED, **place, options={"chunk_size": 8})
    yield "split fp8", replace(RAGGED, **place, options={"kv_cache_dtype": "fp8"}, k_scale=0.5)
    plain: dict[str, Any] = {"options": {"non_causal": True}, "causal": False}
    yield "split non-causal", replace(RAGGED, **place, **plain)
    for interleave in (1, 4):
        both: dict[str, Any] = {"dcp": 2, "pcp": 2, "interleave": interleave, "sinks": True}
        yield f"split and sharded {interleave}", replace(RAGGED, **both)
        yield f"split and sharded prefill {interleave}", replace(PREFILL, **both, window=40)


def declared() -> list[str]:
    """Return the backends of this machine's CPU that say that they can be sharded."""
    request = AttentionRequest(
        num_heads=2,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.bfloat16,
        block_size=BLOCK,
        dcp_size=2,
    )
    facts = DEFAULT_SELECTOR.device_facts(torch.device("cpu"))
    selection = DEFAULT_SELECTOR.resolve(request, facts, Policy())
    served = (VerdictStatus.CHOSEN, VerdictStatus.ELIGIBLE)
    return [verdict.name for verdict in selection.verdicts if verdict.status in served]


def cases() -> dict[str, Case]:
    """Return every case by name."""
    found = dict(_placements()) | dict(_features()) | dict(_rules_of_causality())
    found |= dict(_splits())
    found["no tokens"] = Case(query_lens=(0, 0), seq_lens=(0, 0))
    found["no requests"] = Case(query_lens=(), seq_lens=())
    found["reference"] = replace(RAGGED, backend="SHARDED_REFERENCE", interleave=4, sinks=True)
    found["reference split"] = replace(RAGGED, backend="SHARDED_REFERENCE", dcp=1, pcp=2, window=9)
    for name in declared():
        wide: dict[str, Any] = {"backend": name, "width": 64, "dtype": torch.bfloat16}
        found[f"{name} ragged"] = replace(RAGGED, interleave=4, **wide)
        found[f"{name} prefill"] = replace(PREFILL, **wide)
        found[f"{name} speculative"] = replace(SPECULATIVE, dcp=4, combine="a2a", **wide)
    for window in (None, 7):
        found[f"bounded lengths, window {window}"] = replace(
            RAGGED,
            backend="SHARDED_REFERENCE",
            host_lengths_exceed_by=3,
            window=window,
            checked=True,
        )
    for window in (None, 7, 40):
        found[f"unknown lengths, window {window}"] = replace(
            RAGGED,
            backend="SHARDED_REFERENCE",
            has_exact_lengths=False,
            window=window,
            interleave=4,
        )
    return found
