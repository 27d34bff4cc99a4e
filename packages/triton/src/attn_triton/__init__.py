"""Attention kernels in portable Triton and the backends on them, for NVIDIA, AMD and Intel GPUs."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
