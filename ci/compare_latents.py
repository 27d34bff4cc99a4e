"""Recorded choices of what prefills over latents, row by row, and why attn's differ.

Per row: who is chosen, and for each prefill that both know the reasons of both. A prefill that
attn does not provide is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from differences import Difference, Rule, compare_reasons
from recorded import CODES, Row, device_of, policy_of, rows

if TYPE_CHECKING:
    from attn_shared.request import AttentionRequest
    from attn_shared.selection import Selection

__all__ = ["compare_mla_prefill", "latent_rules"]

_FILE = "mla_prefill"
_PORTABLE = {"TORCH_SDPA", "TRITON"}
_RANK = 512


def compare_mla_prefill() -> Iterator[Difference]:
    """Compare every row: the choice, and the reasons against it."""
    for row in rows(_FILE):
        ours = _answer(row)
        chosen = None if ours is None else ours.chosen
        if chosen != row["chosen"]:
            yield Difference(
                file=_FILE,
                row=row,
                subject="prefill",
                code="chosen",
                side="here" if chosen is not None else "there",
                here=chosen,
                there=row["chosen"],
            )
        for name, codes in row["rejected"].items():
            yield from _reasons(row, ours, name, codes)


def _reasons(row: Row, ours: Selection | None, name: str, codes: list[str]) -> Iterator[Difference]:
    verdict = None
    if ours is not None:
        verdict = next((v for v in ours.verdicts if v.name == name), None)
    if verdict is None:
        return
    here = {reason.code for reason in verdict.reasons}
    there = {CODES.get(code, code) for code in codes}
    yield from compare_reasons(row, _FILE, name, here, there)


def _answer(row: Row) -> Selection | None:
    """What attn decides; None where the named prefill is one that nothing provides."""
    from attn_shared.choice import select
    from attn_shared.errors import NoBackendError, UnknownNameError
    from attn_shared.selector import DEFAULT_SELECTOR

    device = device_of(row)
    policy = policy_of(row, row["forced"])
    inventory = DEFAULT_SELECTOR.inventory(device)
    try:
        return select(_request(row), device, inventory, policy, kind="mla_prefill")
    except UnknownNameError:
        return None
    except NoBackendError as error:
        if error.selection is None:
            raise
        return error.selection


def _request(row: Row) -> AttentionRequest:
    from attn_shared.mla_prefill import prefill_request
    from attn_shared.request import AttentionRequest, MLADims

    nope, rope, value = row["mla_dims"]
    dims = MLADims(
        kv_lora_rank=_RANK, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value
    )
    request = AttentionRequest(
        num_heads=16, num_kv_heads=1, head_size=dims.latent_size, dtype=row["dtype"], mla=dims
    )
    return prefill_request(request)


def latent_rules() -> Iterator[Rule]:
    """Why these are decided otherwise."""

    def rule(name: str, reason: str, evidence: str, explains: object) -> Rule:
        return Rule(
            name=name,
            files=(_FILE,),
            reason=reason,
            evidence=evidence,
            explains=explains,  # type: ignore[arg-type]
        )

    yield rule(
        "an AITER that counts as absent is passed over",
        "The rows without AITER are decided by a policy that avoids it, and what is avoided is "
        "asked for no reasons.",
        "recorded.policy_of; `attn explain`",
        lambda d: d.subject == "ROCM_AITER_FA" and d.side == "there" and d.row["aiter"] == "absent",
    )
    yield rule(
        "latents are prefilled by a portable kernel where no vendor's serves them",
        "v0.25.1 has no prefill for float32, and none on AMD GPUs without AITER, whose model then "
        "does not load.",
        "vllm#32732: every cell has a last resort or a named gap",
        lambda d: d.code == "chosen" and d.here in _PORTABLE and d.there is None,
    )
    yield rule(
        "FlashAttention has no kernels below compute capability 8.0, for prefills as for layers",
        "v0.25.1 asks no architecture of its prefill FLASH_ATTN, which then has no function to "
        "call on Turing.",
        "the kernels' own limit, which v0.25.1 knows for its layers (vllm#13766)",
        lambda d: (
            d.row["arch"] == "7.5"
            and d.side == "here"
            and (
                d.subject == "FLASH_ATTN"
                or (d.code == "chosen" and d.here in _PORTABLE and d.there == "FLASH_ATTN")
            )
        ),
    )
    yield rule(
        "a device that a prefill does not run on is said before a library that is missing",
        "v0.25.1 adds that FlashInfer is not importable on AMD GPUs: installing it would not help.",
        "`attn_shared.verdicts.judge`; vllm#22193: a hint must be valid where it is given",
        lambda d: d.code == "unavailable" and d.side == "there" and "device" in str(d.here),
    )
