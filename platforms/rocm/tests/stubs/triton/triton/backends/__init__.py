"""What triton lists of its back ends."""

from __future__ import annotations

backends = {"amd": object(), "nvidia": object()}
