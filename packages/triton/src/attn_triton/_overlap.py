"""Decodes beside prompts: whether a step's two kinds of launches run at once, and on what stream.

Each kind alone may leave multiprocessors idle: a few decodes start no wave, and a short prompt's
last blocks run alone. Launched on two streams, the other's programs take what is free.
"""

from __future__ import annotations

from types import TracebackType

import torch

from attn_shared.arch import Arch

__all__ = ["SideStream", "overlaps"]

_MEASURED = ("hopper",)
"""Families where two streams were measured; elsewhere one kind follows the other."""


def overlaps(arch: Arch, *, num_decodes: int, num_prompt_blocks: int, is_captured: bool) -> bool:
    """Return whether a step's decodes run beside its prompts.

    Args:
        arch: of the device.
        num_decodes: requests whose keys are cut into parts, at most.
        num_prompt_blocks: blocks of query rows of the other requests, at most.
        is_captured: the step goes into a graph, where a second stream costs the host nothing.
    """
    if arch.family not in _MEASURED:
        return False
    return bool(is_captured and num_decodes and num_prompt_blocks)


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
        self._stream = torch.cuda.Stream(device)
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self._current: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        """Make the second stream the current one, behind what the current one was given."""
        self._current = torch.cuda.current_stream(self._device)
        self._forked.record(self._current)
        self._stream.wait_event(self._forked)
        torch.cuda.set_stream(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Make the stream the current one again that was."""
        self._joined.record(self._stream)
        if self._current is not None:
            torch.cuda.set_stream(self._current)

    def join(self) -> None:
        """Have the current stream wait for what was launched in the context."""
        if self._current is not None:
            self._current.wait_event(self._joined)
