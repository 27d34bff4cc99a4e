"""Figures as a person reads them."""

from __future__ import annotations

__all__ = ["duration", "figures", "flops", "percent", "ratio_words"]


def figures(value: float) -> str:
    """Return a number with three significant digits, and no exponent: "12.3", "0.0123", "1230"."""
    if value == 0:
        return "0"
    digits = max(0, 2 - _magnitude(value))
    return f"{round(value, 2 - _magnitude(value)):.{digits}f}"


def _magnitude(value: float) -> int:
    return int(f"{value:.2e}".split("e")[1])


def duration(time_us: float) -> str:
    """Return a time in the unit that suits it: "12.3 us", "4.56 ms", "1.23 s"."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if time_us >= size:
            return f"{figures(time_us / size)} {unit}"
    return f"{figures(time_us)} us"


def flops(tflop_per_s: float) -> str:
    """Return a rate of operations in the unit that suits it: "450 GFLOP/s", "12.3 TFLOP/s"."""
    if tflop_per_s < 1:
        return f"{figures(tflop_per_s * 1e3)} GFLOP/s"
    return f"{figures(tflop_per_s)} TFLOP/s"


def percent(share: float) -> str:
    """Return a share as "85%", and a small one as "0.4%"."""
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"


def ratio_words(ratio: float) -> str:
    """Return "0.62", "1.10" or "12.3"."""
    return f"{ratio:.2f}" if ratio < 9.995 else figures(ratio)
