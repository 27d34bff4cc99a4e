"""What triton lists of its back ends."""

from __future__ import annotations

backends = {"intel": object()}
