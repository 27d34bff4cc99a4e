"""The default order of backends on NVIDIA GPUs."""

from __future__ import annotations

from attn_shared.arch import parse_arch
from attn_shared.platform import PriorityBand
from attn_shared.ranking import Rank
from attn_shared.request import AttentionRequest, MLADims, Phase
from attn_triton.mla_prompt_tiles import plain_because

__all__ = [
    "MLA_PREFILL_PRIORITIES",
    "MLA_PRIORITIES",
    "PRIORITIES",
    "has_deepseeks_widths",
    "has_many_heads",
]

_HOPPER = frozenset({"hopper"})
_BLACKWELL = frozenset({"blackwell"})
_DECODE = frozenset({Phase.DECODE})
_H200 = (
    "measured on an H200 (torch 2.11, Triton 3.6, bfloat16, 32/8 heads of 128; "
    "docs/benchmarks/selection.json)"
)

PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="FLASH_ATTN",
        priority=PriorityBand.PERFORMANT,
        families=_HOPPER,
        provenance=f"{_H200}: the fastest in prefill, where TRITON_ATTN takes 1.15 to 1.21 times "
        "as long, and within 1.11 of it in decode, with vLLM 0.25.1's FlashAttention 3",
    ),
    Rank(
        name="FLASH_ATTN",
        priority=PriorityBand.PERFORMANT,
        provenance="not measured on this hardware; kernels written for NVIDIA before portable ones",
    ),
    Rank(
        name="FLASH_ATTN_DIFFKV",
        priority=None,
        provenance="FLASH_ATTN under another name, which serves the same layers",
    ),
    Rank(
        name="FLASHINFER_TRTLLM",
        priority=PriorityBand.PERFORMANT + 40,
        families=_BLACKWELL,
        provenance="not measured on this hardware; vLLM 0.25.1 takes FlashInfer first on it, and "
        "within FlashInfer these kernels, which NVIDIA wrote for it",
    ),
    Rank(
        name="FLASHINFER_TRTLLM",
        priority=None,
        provenance="not measured on this hardware; XQA serves decode alone, and FLASHINFER's "
        "own kernels the rest",
    ),
    Rank(
        name="FLASHINFER",
        priority=PriorityBand.PERFORMANT + 20,
        families=_BLACKWELL,
        provenance="not measured on this hardware; before FLASH_ATTN as vLLM 0.25.1 has it",
    ),
    Rank(
        name="FLASHINFER",
        priority=PriorityBand.PERFORMANT - 60,
        families=_HOPPER,
        phases=_DECODE,
        provenance="measured on an H200 (torch 2.11, Triton 3.6, bfloat16, 32/8 heads of 128; "
        "docs/triton-kernels.md): FlashInfer's own call takes 1.01 to 1.33 times as long as "
        "TRITON_ATTN's kernel, both captured, and is compiled for half a minute at first use",
    ),
    Rank(
        name="FLASHINFER",
        priority=PriorityBand.PERFORMANT - 20,
        provenance="not measured on this hardware or in this phase; behind FLASH_ATTN and before "
        "TRITON_ATTN as vLLM 0.25.1 has it",
    ),
    Rank(
        name="TRITON_ATTN",
        priority=PriorityBand.PERFORMANT - 50,
        families=_HOPPER,
        provenance=f"{_H200}: 1.11 times as fast as FLASH_ATTN in decode at 2x2048, 1.02 at "
        "4x3000 and 0.97 at 16x3000, but in prefill 0.82 to 0.87",
    ),
    Rank(
        name="TRITON_ATTN",
        priority=PriorityBand.PERFORMANT - 50,
        provenance="not measured on this hardware; before the backends on torch alone because its "
        "kernels read blocks where they are, and behind the vendors' own",
    ),
    Rank(
        name="TORCH_SDPA",
        priority=PriorityBand.PORTABLE,
        families=_HOPPER,
        provenance=f"{_H200}: 3.1 to 3.7 times the fastest in decode, 1.3 to 1.6 in prefill; "
        "before FLEX_ATTENTION because it compiles nothing",
    ),
    Rank(
        name="TORCH_SDPA",
        priority=PriorityBand.PORTABLE,
        provenance="not measured on this hardware; before FLEX_ATTENTION because it serves more "
        "of the contract and compiles nothing",
    ),
    Rank(
        name="FLEX_ATTENTION",
        priority=PriorityBand.PORTABLE - 10,
        provenance="not measured on this hardware; after TORCH_SDPA because it compiles a kernel "
        "per kind of shape",
    ),
)
"""Rows for `attn_shared.ranking.rank`; a row may name families, architectures and phases.

FlashAttention stays first on Hopper in both phases: its lead in prefill is clear, and in decode the
order turns between 4 and 16 requests, within 3 % from 4 requests on. Against the direct call of
tokenspeed-fa3, both captured, TRITON_ATTN took 0.66 of the time at 1x1024, 0.94 at 32x4096 and 0.89
at 256x1024 in 3 rounds on a busy machine; with vLLM's build such batches were not compared.
"""

_H200_LATENTS = (
    "measured on an H200 (torch 2.11, bfloat16, 512 + 64, page 64; docs/benchmarks/h200-mla.json)"
)
_MANY_HEADS = 64


def has_many_heads(request: AttentionRequest) -> bool:
    """Whether the heads of a single token fill the 64 rows of FLASHMLA's tile."""
    return request.num_heads >= _MANY_HEADS


def has_deepseeks_widths(request: AttentionRequest) -> bool:
    """Whether TRITON prefills expanded heads by its kernel for Hopper there."""
    dims = request.mla or MLADims()
    return plain_because(parse_arch("sm_90"), dims, request.dtype, has_gluon=True) is None


_VENDORS_LATENTS = "not measured on this hardware; kernels written for it before portable ones"

MLA_PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="FLASHMLA",
        priority=PriorityBand.PERFORMANT + 10,
        families=_HOPPER,
        fits=has_many_heads,
        provenance=f"{_H200_LATENTS}: with 128 heads 0.81 to 0.91 of FLASH_ATTN_MLA's time in "
        "batches, 1.17 for one request",
    ),
    Rank(
        name="FLASH_ATTN_MLA",
        priority=PriorityBand.PERFORMANT,
        provenance=f"{_H200_LATENTS}: with 16 heads 0.73 of FLASHMLA's time for one request, 1.02 "
        "to 1.07 in batches",
    ),
    Rank(
        name="FLASHMLA",
        priority=PriorityBand.PERFORMANT - 10,
        provenance=f"{_H200_LATENTS}: behind FLASH_ATTN_MLA for few heads",
    ),
    Rank(
        name="FLASHINFER_MLA",
        priority=PriorityBand.PERFORMANT - 20,
        families=_HOPPER,
        provenance=f"{_H200_LATENTS}: 0.91 to 1.22 of FLASH_ATTN_MLA's time; compiled at first "
        "use, and planned on the host for each step",
    ),
    Rank(
        name="FLASHINFER_MLA",
        priority=PriorityBand.PERFORMANT,
        provenance="not measured on this hardware; trtllm-gen's kernels, written for it",
    ),
    Rank(
        name="CUTLASS_MLA",
        priority=PriorityBand.PERFORMANT - 10,
        provenance="not measured on this hardware; single query tokens alone, and all heads padded "
        "to 128",
    ),
    Rank(
        name="TRITON_MLA",
        priority=PriorityBand.PERFORMANT - 50,
        families=_HOPPER,
        provenance="measured on an H200 (torch 2.11, Triton 3.6, bfloat16, 512 + 64, page 64; "
        "docs/triton-mla.md): 1.02 times FLASHMLA's time at 32x4096 with 16 heads, 1.46 with 128",
    ),
    Rank(
        name="TRITON_MLA",
        priority=PriorityBand.PERFORMANT - 50,
        provenance="not measured on this hardware; before the backend on torch alone because its "
        "kernels read blocks where they are, and behind the vendors' own",
    ),
    Rank(
        name="TORCH_MLA",
        priority=PriorityBand.PORTABLE,
        provenance="not measured on this hardware; on torch alone, behind kernels that "
        "read blocks where they are",
    ),
)
"""The same for layers of multi-head latent attention."""

MLA_PREFILL_PRIORITIES: tuple[Rank, ...] = (
    Rank(
        name="FLASH_ATTN",
        priority=PriorityBand.PERFORMANT,
        families=_HOPPER,
        provenance="measured on an H200 (torch 2.11, bfloat16, 192 and 128, FlashAttention 3; "
        "docs/benchmarks/h200-mla-prefill.json): 0.50 to 0.82 of TORCH_SDPA's time",
    ),
    Rank(
        name="FLASH_ATTN",
        priority=PriorityBand.PERFORMANT,
        provenance=_VENDORS_LATENTS,
    ),
    Rank(
        name="TRTLLM_RAGGED",
        priority=PriorityBand.PERFORMANT - 10,
        provenance=f"{_VENDORS_LATENTS}; a few widths",
    ),
    Rank(
        name="FLASHINFER",
        priority=PriorityBand.PERFORMANT - 20,
        provenance=f"{_VENDORS_LATENTS}; one set of widths, and planned on the host",
    ),
    Rank(
        name="TRITON",
        priority=PriorityBand.PERFORMANT - 50,
        families=_HOPPER,
        fits=has_deepseeks_widths,
        provenance="measured on an H200 (torch 2.11, Triton 3.6, bfloat16, heads of 192 and 128; "
        "docs/triton-mla.md): 1.11 to 1.23 times FLASH_ATTN's time, about half of its portable "
        "kernel's",
    ),
    Rank(
        name="TRITON",
        priority=PriorityBand.PORTABLE - 10,
        families=_HOPPER,
        provenance="measured on an H200 (torch 2.11, Triton 3.6, bfloat16, heads of 192 and 128; "
        "docs/triton-mla.md): its portable kernel takes 1.2 to 2.4 times TORCH_SDPA's time without "
        "the LSE",
    ),
    Rank(
        name="TRITON",
        priority=PriorityBand.PERFORMANT - 50,
        provenance="not measured on this hardware; before torch alone because its kernel takes two "
        "head sizes and gives the LSE, and behind the vendors' own",
    ),
    Rank(
        name="TORCH_SDPA",
        priority=PriorityBand.PORTABLE,
        provenance="not measured on this hardware; on torch alone, behind every kernel of its own",
    ),
)
"""The same for what prefills such layers."""
