"""Which instruction set the kernels use: the best of this CPU, or one that a test names.

    with forced("avx2"):
        layer.forward(...)

The library asks the processor and the operating system itself; nothing here depends on the machine
that it was built on. It is loaded by the first of these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from attn_cpu._levels import IsaLevel, levels_of
from attn_cpu._vendor.attn_cpu_kernels import load
from attn_shared.errors import InvalidInputError, UnknownNameError

__all__ = [
    "BEST",
    "IsaLevel",
    "built_levels",
    "forced",
    "forced_level",
    "level_named",
    "supported_levels",
]

BEST = -1
"""What the ops take for "the best of this CPU"."""

_FORCED: ContextVar[int] = ContextVar("attn_cpu_isa", default=BEST)


def built_levels() -> tuple[IsaLevel, ...]:
    """Return the levels that the library has code for, the lowest first.

    Raises:
        ImportError: there is no library, or it does not load.
    """
    load()
    return levels_of(torch.ops.attn_cpu.isa_built())


def supported_levels() -> tuple[IsaLevel, ...]:
    """Return the levels that run here: built, in the CPU, and admitted by the operating system.

    Raises:
        ImportError: there is no library, or it does not load.
    """
    load()
    ops = torch.ops.attn_cpu
    found = levels_of(ops.isa_supported(ops.cpu_features()))
    if IsaLevel.AMX_BF16 in found and not ops.amx_permission():
        return tuple(level for level in found if level is not IsaLevel.AMX_BF16)
    return found


def level_named(name: str) -> IsaLevel:
    """Return the level of this name, "avx2".

    Raises:
        UnknownNameError: there is none.
    """
    for level in IsaLevel:
        if level.label == name:
            return level
    raise UnknownNameError.for_name("isa level", name, [level.label for level in IsaLevel])


@contextmanager
def forced(level: IsaLevel | str) -> Iterator[IsaLevel]:
    """Let the calls of this context (of this thread or task) use one level.

    Args:
        level: a level or its name.

    Raises:
        UnknownNameError: there is no such level.
        InvalidInputError: it was not built, or this CPU does not have it.
        ImportError: there is no library, or it does not load.
    """
    wanted = level_named(level) if isinstance(level, str) else level
    supported = supported_levels()
    if wanted not in supported:
        allowed = ", ".join(each.label for each in supported)
        raise InvalidInputError.for_argument("isa", wanted.label, f"{allowed} (on this CPU)")
    token = _FORCED.set(wanted)
    try:
        yield wanted
    finally:
        _FORCED.reset(token)


forced_level: Callable[[], int] = _FORCED.get
"""Return the level of the surrounding `forced`, else `BEST`; what the ops take."""
