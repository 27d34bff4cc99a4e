"""Decodes beside prompts: whether a step's two kinds of launches run at once, and on what stream.

Each kind alone leaves multiprocessors idle: few decodes are no whole wave, and of any grid the last
programs run alone. Launched on two streams, the other's programs take what is free.
"""

from __future__ import annotations

from types import TracebackType

import torch

from attn_shared.arch import Arch

__all__ = ["SideStream", "overlaps"]

_MEASURED = ("hopper",)
"""Families where two streams were measured; elsewhere prompts come first, then decodes."""

_LEAST_PER_UNIT = 1.5
"""Programs of prompts per multiprocessor from which a step outside a graph takes the device as long
as its launches take the host, about 70 us and 5 more with a second stream. On an H200, 24 decodes
up to 2,048 tokens with 1,024 new ones (1.9): 75 us in turn, 58 beside each other behind a busy
device, 74 and 75 in a loop of the host; with 512 (1.0) 56 and 44, but 56 and 75 in such a loop."""


def overlaps(
    arch: Arch, units: int, *, has_decodes: bool, num_prompt_programs: int, is_captured: bool
) -> bool:
    """Return whether a step's decodes run beside its prompts.

    In a graph they always do: of 14 batches on an H200 none was slower, and the smallest took two
    thirds of the time that both took in turn.

    Args:
        arch: of the device.
        units: multiprocessors.
        has_decodes: there may be requests whose keys are cut into parts.
        num_prompt_programs: programs of the plain prefill kernel for the others, at most.
        is_captured: the step goes into a graph, where a second stream costs the host nothing.
    """
    if arch.family not in _MEASURED or not has_decodes or not num_prompt_programs:
        return False
    return is_captured or num_prompt_programs >= _LEAST_PER_UNIT * units


class SideStream:
    """A second stream of a device: what is launched in the context runs beside what follows it.

    Everything launched before comes before both, and after `join` the current stream waits for
    both. So memory that is used in between needs no record of the second stream: it was there
    before the fork, and whoever frees it does so after the join. In a capture the second stream
    becomes part of the graph.

    Args:
        device: of CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of higher priority: decodes are short, and what they wait for is memory alone.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self._outside: tuple[int, torch.cuda.Stream] | None = None

    def __enter__(self) -> None:
        """Make the second stream the current one, behind what the current one was given."""
        stream = torch.cuda.current_stream(self._device)
        self._outside = torch.cuda.current_device(), stream
        self._forked.record(stream)
        self._stream.wait_event(self._forked)
        torch.cuda.set_stream(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Make the stream and the device current again that were."""
        self._joined.record(self._stream)
        if self._outside is not None:
            device, stream = self._outside
            torch.cuda.set_stream(stream)  # makes its device the current one
            if device != stream.device_index:
                torch.cuda.set_device(device)

    def join(self) -> None:
        """Have the stream of the context's outside wait for what was launched in it."""
        if self._outside is not None:
            self._outside[1].wait_event(self._joined)
