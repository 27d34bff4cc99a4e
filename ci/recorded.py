"""Recorded decisions of vLLM 0.25.1 as questions to attn: rows, requests, devices.

The rows are kept beside a checkout, in shared/oracle, or where ATTN_ORACLE_DIR says; nothing here
needs them before they are read.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repository import ROOT

if TYPE_CHECKING:
    from attn_shared.device import DeviceFacts
    from attn_shared.request import AttentionRequest
    from attn_shared.selection import Policy, Selection

__all__ = [
    "CODES",
    "NO_MODEL",
    "Row",
    "answer",
    "device_of",
    "folder",
    "policy_of",
    "request_of",
    "rows",
]

Row = dict[str, Any]

CODES = {
    "capability": "device",
    "mla_requested": "mla",
    "mla_only": "mla",
    "sparse_requested": "sparse",
    "sparse_only": "sparse",
    "combo:fa_sink_below_sm90": "sink",
    "combo:mm_prefix_needs_fa4": "mm_prefix",
}
"""Recorded codes that attn has by another name; the others are alike."""

NO_MODEL = "describes no model"
"""Why `request_of` may have no answer."""


def folder() -> Path:
    """Where the rows are."""
    return Path(os.environ.get("ATTN_ORACLE_DIR") or ROOT.parent / "shared" / "oracle")


@cache
def rows(name: str) -> tuple[Row, ...]:
    """The rows of one file.

    Raises:
        OSError: it is not there.
    """
    text = (folder() / f"{name}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


def device_of(row: Row) -> DeviceFacts:
    """The device of a row: any of its architecture, and for a CPU one with every level."""
    from attn_shared.device import PRESETS, device_from_arch

    match row["platform"]:
        case "cpu":
            return PRESETS["spr"]
        case "xpu":
            return PRESETS["b60"]
    return device_from_arch(row["arch"])


def request_of(config: Row) -> AttentionRequest | str:
    """The request of a row, or `NO_MODEL` where it asks for latents that hold nothing.

    A latent serves all heads, whatever number of kv heads the row gives beside it.
    """
    from attn_shared.request import AttentionRequest, MLADims

    heads: Row = {key: config[key] for key in ("num_heads", "num_kv_heads", "head_size")}
    if config["use_mla"]:
        nope, rope, value = config["mla_dims"]
        rank = config["head_size"] - rope
        if rank < 1:
            return NO_MODEL
        widths = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
        heads |= {"num_kv_heads": 1, "mla": MLADims(kv_lora_rank=rank, **widths)}
    return AttentionRequest(
        dtype=config["dtype"],
        kv_cache_dtype=config["kv_cache_dtype"],
        block_size=config["block_size"],
        has_sinks=config["has_sink"],
        use_sparse=config["use_sparse"],
        index_topk=config.get("index_topk") if config["use_sparse"] else None,
        attn_type=config["attn_type"],
        use_mm_prefix=config["use_mm_prefix"],
        per_head_quant_scales=config["use_per_head_quant_scales"],
        non_causal=config["use_non_causal"],
        batch_invariant=config["use_batch_invariant"],
        use_kv_connector=config["use_kv_connector"],
        flash_attn_version=config.get("flash_attn_version"),
        **heads,
    )


def policy_of(row: Row, backend: str | None = None) -> Policy:
    """The policy of a row: AITER counts as not installed where it was absent.

    Where it was installed and its switch off it counts as installed: attn has no such switch.
    """
    from attn_shared.selection import Policy

    return Policy(backend=backend, avoid=("aiter",) if row.get("aiter") == "absent" else ())


def answer(request: AttentionRequest, device: DeviceFacts, policy: Policy) -> Selection:
    """What attn decides; for a refusal, the selection that it holds."""
    from attn_shared.choice import select
    from attn_shared.errors import NoBackendError
    from attn_shared.selector import DEFAULT_SELECTOR

    try:
        return select(request, device, DEFAULT_SELECTOR.inventory(device), policy)
    except NoBackendError as error:
        if error.selection is None:
            raise
        return error.selection
