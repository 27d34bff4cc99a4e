"""Decodes on a stream beside prompts: when, in what order, and in a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import pytest
import torch
from prompt_cases import prompt_cases

from attn_conformance.case import Case
from attn_conformance.checks import check_numbers
from attn_conformance.rules.graphs import RULES
from attn_conformance.subject import Subject
from attn_shared.arch import parse_arch
from attn_triton import _builder, _calls
from attn_triton._metadata import Step
from attn_triton._overlap import SideStream, overlaps
from attn_triton._prompt_calls import PromptCalls

HOPPER = parse_arch("sm_90")
(_MIXED,) = (case for case in prompt_cases() if case.name.startswith("decodes, chunks"))


class Side:
    """Stands for a second stream where there are none, and tells what was launched on it."""

    def __init__(self, device: torch.device) -> None:
        self.seen: list[str] = []
        sides.append(self)

    def __enter__(self) -> None:
        self.seen.append("fork")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seen.append("back")

    def join(self) -> None:
        self.seen.append("join")


sides: list[Side] = []


@pytest.mark.parametrize(
    ("tokens", "has_decodes", "is_captured", "expected"),
    [
        (1024, True, False, True),
        (512, True, False, False),  # outside a graph the host would take longer than the device
        (512, True, True, True),
        (20, True, True, True),
        (1024, False, True, False),
        (0, True, True, False),
    ],
)
def test_when_decodes_run_beside_prompts(
    tokens: int, has_decodes: bool, is_captured: bool, expected: bool
) -> None:
    blocks = -(-tokens * 4 // 128)  # of 32/8 heads
    facts: dict[str, Any] = {"has_decodes": has_decodes, "num_prompt_programs": blocks * 8}
    assert overlaps(HOPPER, 132, **facts, is_captured=is_captured) is expected
    assert not overlaps(parse_arch("gfx942"), 132, **facts, is_captured=is_captured)


def test_a_second_stream_is_forked_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Stream:
        def __init__(self, name: str, device_index: int) -> None:
            self.name, self.device_index = name, device_index

        def wait_event(self, event: Event) -> None:
            log.append(f"{self.name} waits for {event.recorded}")

    class Event:
        recorded = ""

        def record(self, stream: Stream) -> None:
            self.recorded = stream.name

    current = [Stream("main", 1)]
    fakes = {
        "Stream": lambda device, priority: Stream("side", 1),
        "Event": Event,
        "current_stream": lambda device: current[-1],
        "current_device": lambda: 0,
        "set_device": lambda index: log.append(f"device {index}"),
        "set_stream": lambda stream: log.append(f"on {stream.name}"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    side = SideStream(torch.device("cuda:1"))
    with suppress(ZeroDivisionError), side:
        log.append("decodes")
        raise ZeroDivisionError
    log.append("prompts")
    side.join()
    around = ["side waits for main", "on side", "decodes", "on main", "device 0"]
    assert log == [*around, "prompts", "main waits for side"]


@pytest.mark.interpreter
@pytest.mark.parametrize("has_kernel", [True, False], ids=["prompts", "plain"])
def test_decodes_come_first_and_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, has_kernel: bool
) -> None:
    sides.clear()
    monkeypatch.setattr(_builder, "SideStream", Side)
    monkeypatch.setattr(_builder, "overlaps", lambda *_, **facts: facts["has_decodes"])
    monkeypatch.setattr(_builder, "_HAS_STREAMS", ("cpu",))
    run, prepared = _calls._launch, PromptCalls.prepared

    def launched(kernels: Any, step: Step, *args: Any) -> None:
        sides[-1].seen += [name for name in ("decode", "prefill") if getattr(step, name)]
        run(kernels, step, *args)

    def watched(*args: Any) -> Callable[[], None] | None:
        found = prepared(*args) if has_kernel else None
        if found is None:
            return None

        def launch() -> None:
            sides[-1].seen.append("prompts")
            found()

        return launch

    monkeypatch.setattr(_calls, "_launch", launched)
    monkeypatch.setattr(PromptCalls, "prepared", watched)
    check_numbers(Subject.find("interpreted_backend:InterpretedBackend", "cpu"), _MIXED)
    (side,) = sides
    kernel = "prompts" if has_kernel else "prefill"
    once = ["fork", "decode", "back", kernel, "join"]
    assert side.seen == 2 * once  # without an LSE and with one


@pytest.mark.cuda
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_captured_mixed_batch(block_size: int) -> None:
    case: Case = _MIXED.with_fields(block_size=block_size, nan_tail=False, num_padding_rows=0)
    (replay,) = (rule for rule in RULES if rule.name == "replay")
    replay.check(Subject.find("TRITON_ATTN", "cuda:0"), case.with_fields(variant="mixed"))
