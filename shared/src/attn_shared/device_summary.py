"""Devices in words, for availability, tables and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attn_shared.device import DeviceFacts

__all__ = ["summarize"]


def summarize(devices: Iterable[DeviceFacts]) -> str:
    """Count devices by name and architecture, "2 x NVIDIA H200 (sm_90)"; "" if there are none."""
    counts = Counter(f"{device.name} ({device.arch})" for device in devices)
    return ", ".join(f"{count} x {text}" for text, count in counts.items())
