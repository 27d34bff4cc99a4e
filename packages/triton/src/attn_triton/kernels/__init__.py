"""The kernels; the only modules that import triton, and loaded only to run or compile one."""

from __future__ import annotations

__all__: list[str] = []
