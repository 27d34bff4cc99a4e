"""What AITER at commit e4048607a5 exports, of what is used here."""

from __future__ import annotations

from aiter.ops.attention import pa_fwd_asm, paged_attention_v1
from aiter.ops.mha import flash_attn_varlen_func, mha_batch_prefill_func

__all__ = ["flash_attn_varlen_func", "mha_batch_prefill_func", "pa_fwd_asm", "paged_attention_v1"]
