"""Recorded selections beside attn's: what is chosen, who may run, and for which reasons not.

Per row, for each backend that both know and attn provides: the reasons of both. Then the order:
whoever stands first in the recorded order, among those that serve by attn's own reasons, is whom
attn must choose. A recorded choice that attn does not provide is told apart from all that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from differences import Difference, compare_reasons
from recorded import CODES, NO_MODEL, Row, answer, device_of, policy_of, request_of, rows

if TYPE_CHECKING:
    from attn_shared.request import AttentionRequest
    from attn_shared.selection import Selection

__all__ = ["compare_decisions", "compare_forced", "recorded_order"]

DECISIONS, FORCED = "decisions", "forced"


def compare_decisions() -> Iterator[Difference]:
    """Compare every automatic selection."""
    for row in rows(DECISIONS):
        request = request_of(row["config"])
        if isinstance(request, str):
            yield Difference(file=DECISIONS, row=row, subject="request", code=NO_MODEL, side="here")
            continue
        ours = answer(request, device_of(row), policy_of(row))
        yield from _reasons(row, ours)
        yield from _missing(row)
        yield from _order(row, ours)


def _reasons(row: Row, ours: Selection) -> Iterator[Difference]:
    """Compare the reasons of each backend that both have."""
    for name, codes in _recorded_verdicts(row).items():
        verdict = next((v for v in ours.verdicts if v.name == name), None)
        if verdict is None:
            continue
        there = {CODES.get(code, code) for code in codes}
        here = {reason.code for reason in verdict.reasons}
        yield from compare_reasons(row, DECISIONS, name, here, there)


def _recorded_verdicts(row: Row) -> dict[str, list[str]]:
    """Recorded reasons by attn's names; the platforms without validation say "none" to one."""
    if row["platform"] in ("xpu", "cpu"):
        return {} if row["chosen"] is None else {_name(row, row["chosen"]): []}
    valid: dict[str, list[str]] = {name: [] for name in row["candidates"]}
    return {**valid, **row["rejected"]}


def _name(row: Row, name: str) -> str:
    """Intel's FlashAttention has a name of its own here."""
    return "XPU_FLASH_ATTN" if (row["platform"], name) == ("xpu", "FLASH_ATTN") else name


def _missing(row: Row) -> Iterator[Difference]:
    """Say so where the recorded choice is one that attn does not provide."""
    from attn_shared.registry import DEFAULT_REGISTRY

    if row["chosen"] is None:
        return
    name = _name(row, row["chosen"])
    if name not in DEFAULT_REGISTRY.names():
        yield Difference(
            file=DECISIONS, row=row, subject="missing", code=name, side="there", there=name
        )


def _order(row: Row, ours: Selection) -> Iterator[Difference]:
    """Compare the choice with the first in the recorded order that serves by attn's reasons."""
    from attn_shared.selection import VerdictStatus

    usable = (VerdictStatus.CHOSEN, VerdictStatus.ELIGIBLE)
    serving = [v.name for v in ours.verdicts if v.status in usable]
    expected = next((name for name in recorded_order(row) if name in serving), None)
    if ours.chosen != expected:
        yield Difference(
            file=DECISIONS,
            row=row,
            subject="order",
            code=f"{ours.chosen} instead of {expected}",
            side="here",
            here=ours.chosen,
            there=expected,
        )


def recorded_order(row: Row) -> tuple[str, ...]:
    """The order of v0.25.1, with attn's own backends where latents are asked for: torch's last."""
    config = row["config"]
    if config["use_mla"]:
        return (*_recorded_latents(row), "TORCH_MLA")
    match row["platform"]:
        case "cpu":
            return ("CPU_ATTN",)
        case "xpu" if config["use_mm_prefix"] or config["dtype"] == "float32":
            return ("TRITON_ATTN",)
        case "xpu":
            return ("XPU_FLASH_ATTN",)
        case "rocm":
            return ("ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN")
    first = ("FLASHINFER", "FLASH_ATTN") if row["arch"].startswith("10.") else ("FLASH_ATTN",)
    return (*first, "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")


def _recorded_latents(row: Row) -> tuple[str, ...]:
    """The order of v0.25.1 among dense backends over latents."""
    match row["platform"]:
        case "cpu":
            return ("CPU_MLA",)
        case "xpu":
            return ("TRITON_MLA",)
        case "rocm":
            return ("ROCM_AITER_MLA", "TRITON_MLA", "ROCM_AITER_TRITON_MLA")
    hopper = ("FLASH_ATTN_MLA", "FLASHMLA")
    match row["arch"].split(".")[0]:
        case "10":
            return ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", *hopper, "TRITON_MLA")
        case "12":
            return ("TRITON_MLA",)
    return (*hopper, "FLASHINFER_MLA", "TRITON_MLA")


def compare_forced() -> Iterator[Difference]:
    """Compare every selection of a backend that was named."""
    from attn_shared.registry import DEFAULT_REGISTRY

    for row in rows(FORCED):
        name = _name(row, row["config"]["backend"])
        request = request_of(row["config"])
        if name not in DEFAULT_REGISTRY.names():
            yield Difference(
                file=FORCED, row=row, subject="missing", code=name, side="there", there=name
            )
        elif isinstance(request, str):
            yield Difference(file=FORCED, row=row, subject="request", code=NO_MODEL, side="here")
        else:
            yield from _forced(row, name, request)


def _forced(row: Row, name: str, request: AttentionRequest) -> Iterator[Difference]:
    from attn_shared.errors import VendorMissingError

    try:
        ours = answer(request, device_of(row), policy_of(row, name))
    except VendorMissingError as error:
        yield Difference(
            file=FORCED,
            row=row,
            subject=name,
            code="library",
            side="here",
            here=error.message,
            there=row["chosen"],
        )
        return
    here = {reason.code for reason in ours.verdict(name).reasons}
    if row.get("error") is None and row["chosen"] != row["config"]["backend"]:
        yield Difference(
            file=FORCED,
            row=row,
            subject=name,
            code="replaced",
            side="there",
            here=ours.chosen,
            there=row["chosen"],
        )
        return
    if row.get("error") in (None, "forced_backend_rejected"):
        codes = {c for reasons in row["rejected"].values() for c in reasons}
        yield from compare_reasons(
            row, FORCED, name, here, {CODES.get(code, code) for code in codes}
        )
        return
    yield Difference(
        file=FORCED,
        row=row,
        subject=name,
        code=str(row.get("error")),
        side="there",
        here=ours.chosen or sorted(here),
        there=row.get("error"),
    )
