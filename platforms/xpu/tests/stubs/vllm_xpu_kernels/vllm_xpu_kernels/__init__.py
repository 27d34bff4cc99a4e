"""What vllm-xpu-kernels 0.1.16.2 exports."""

from __future__ import annotations

from vllm_xpu_kernels.flash_attn_interface import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func"]
