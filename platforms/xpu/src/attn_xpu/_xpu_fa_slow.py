"""Hearing vllm-xpu-kernels take its slow reference, call by call.

Its wheel has compiled kernels for some combinations of head size, mask, sinks and LSE. For others
its function catches the kernel's "not compiled", says so once per message on stderr and in its log,
and computes with torch operations that wait for the device: right answers, many times slower. At
the second call neither sign is there, so the function that computes is watched instead.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from attn_shared.errors import UnsupportedOptionError
from attn_xpu._xpu_fa_capability import NAME

__all__ = ["FALLBACK", "SlowReferenceWarning", "count", "is_watched", "watch"]

FALLBACK = "_fallback_varlen_attn"
"""The library's function that stands in for a kernel; its own tests replace it by this name."""

_MARK = "__attn_watched__"
_CALLS = threading.local()


class SlowReferenceWarning(RuntimeWarning):
    """A vendor's library computed with its slow reference, since it has no kernel for the call."""


def count() -> int:
    """Return how often this thread has had the reference take a kernel's place."""
    return int(getattr(_CALLS, "count", 0))


def is_watched(interface: ModuleType) -> bool:
    """Whether the module's stand-in is counted; a release without one has nothing to count."""
    return hasattr(getattr(interface, FALLBACK, None), _MARK)


def watch(interface: ModuleType) -> None:
    """Count the calls of a module's stand-in; what it computes stays its own."""
    original: Callable[..., Any] | None = getattr(interface, FALLBACK, None)
    if original is None or is_watched(interface):
        return

    @functools.wraps(original)
    def counted(*arguments: Any, **keywords: Any) -> Any:
        _refuse_dropped_window(original, arguments, keywords)
        _CALLS.count = count() + 1
        return original(*arguments, **keywords)

    setattr(counted, _MARK, True)
    setattr(interface, FALLBACK, counted)


def _refuse_dropped_window(
    original: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """Refuse a window that the reference leaves out: it looks for a side above 0 alone.

    Raises:
        UnsupportedOptionError: the window would be dropped without a word.
    """
    names = original.__code__.co_varnames if hasattr(original, "__code__") else ()
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    left, right = given.get("window_size", (-1, -1))
    is_hidden = left == 0 or (right == 0 and not given.get("causal", False))
    if max(left, right) <= 0 and is_hidden:
        raise UnsupportedOptionError(
            f"window ({left}, {right}) is not served by {NAME} here: its library has no compiled "
            "kernel for the call, and its reference drops such a window; allowed: a side above 0.",
            hint="TRITON_ATTN and TORCH_SDPA serve it.",
        )
