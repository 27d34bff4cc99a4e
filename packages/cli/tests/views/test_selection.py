from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from attn_cli.request_flags import RequestFlags
from attn_cli.views.selection import brief, full
from attn_shared.capability import Reason
from attn_shared.device import preset
from attn_shared.kernel_paths import KernelPath
from attn_shared.selection import DecidedBy, Policy, Selection, Verdict, VerdictStatus

VERDICTS = (
    Verdict(
        name="FAST",
        status=VerdictStatus.CHOSEN,
        priority=200,
        provenance="measured in a lab",
        slow_features=("softcap",),
    ),
    Verdict(name="NAMED", status=VerdictStatus.ELIGIBLE),
    Verdict(
        name="PICKY",
        status=VerdictStatus.REJECTED,
        priority=100,
        provenance="a rule",
        reasons=(
            Reason(code="head_size", value="80", allowed="64, 128", hint="pad the heads."),
            Reason(code="sink", value="True", allowed="not set"),
        ),
    ),
    Verdict(
        name="GONE",
        status=VerdictStatus.UNAVAILABLE,
        priority=90,
        provenance="a rule",
        detail="lib is not installed; pip install lib[x]",
    ),
)


def selection(**changes: Any) -> Selection:
    flags = RequestFlags(num_heads=8, num_kv_heads=2, head_size=80, softcap=30.0, mla=False)
    values: dict[str, Any] = {
        "request": flags.to_request(),
        "device": preset("h200"),
        "policy": Policy(),
        "chosen": "FAST",
        "backend": None,
        "kv_layout": "NHD",
        "block_size": 16,
        "decided_by": DecidedBy.DEFAULT,
        "verdicts": VERDICTS,
    }
    return Selection(**{**values, **changes})


def rendered(view: Any, chosen: Selection, width: int = 80, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, **options)
    for part in view(chosen):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_brief_gives_the_choice_and_codes() -> None:
    text = squeezed(rendered(brief, selection()))
    assert text.startswith(
        "FAST on NVIDIA H200 (sm_90) block size 16, KV layout NHD, decided by default order"
    )
    assert "FAST chosen slow path for: softcap priority 200" in text
    assert "NAMED eligible by name only" in text
    assert "PICKY rejected head_size 80, sink True" in text
    assert "GONE unavailable lib is not installed; pip install lib[x]" in text
    assert "note: NVIDIA H200 is simulated" in text


def test_full_gives_the_request_and_each_reason_whole() -> None:
    text = squeezed(rendered(full, selection()))
    assert text.startswith(
        "Asked: 8 query heads, 2 kv heads, head size 80, bfloat16, softcap=30.0 "
    )
    assert "head_size = 80 allowed: 64, 128 hint: pad the heads." in text
    assert "sink = True allowed: not set" in text
    assert "priority 200: measured in a lab" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"decided_by": DecidedBy.USER, "policy": Policy(backend="FAST", source="a whim")},
            "decided by the user (a whim)",
        ),
        ({"decided_by": DecidedBy.MODEL}, "decided by the model's requirement"),
        ({"decided_by": DecidedBy.MEASURED}, "decided by measurement on this device"),
        (
            {"decided_by": DecidedBy.PREFERENCE, "policy": Policy(prefer=("fast",))},
            "decided by preference of fast",
        ),
        ({"block_size": None}, "no cache, decided by"),
        ({"chosen": None, "verdicts": VERDICTS[1:]}, "No backend on NVIDIA H200 (sm_90)"),
    ],
)
def test_the_choice_says_who_decided(changes: Any, words: str) -> None:
    assert words in squeezed(rendered(brief, selection(**changes)))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("view", [brief, full])
def test_it_fits_the_terminal(view: Any, width: int) -> None:
    assert max(map(len, rendered(view, selection(), width).splitlines())) <= width


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in rendered(full, selection())
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;32m" in rendered(full, selection(), force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in rendered(full, selection(), force_terminal=True)


def test_the_full_view_says_which_kernels_run_what() -> None:
    path = KernelPath(rows="decodes", kernel="the split-KV kernel", why="few rows")
    told = (dataclasses.replace(VERDICTS[0], paths=(path,)), *VERDICTS[1:])
    text = rendered(full, selection(verdicts=told))
    assert "decodes: the split-KV kernel" in text
    assert "few rows" in text
    assert "split-KV" not in rendered(full, selection())
