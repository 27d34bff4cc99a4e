"""The support matrix: every backend on every architecture, feature by feature.

Each cell is a request put to the backend's capability, as the selector puts it.
"""

from __future__ import annotations

__all__: list[str] = []
