"""Backend names that the field knows, as data: vLLM 0.25.1's registries and attn's own additions.

A name here is a name, not a promise: which ones are provided is known by the registry, from the
distributions that are installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from attn_shared.device import Vendor

__all__ = [
    "KNOWN_BACKENDS",
    "KNOWN_MAMBA_BACKENDS",
    "KNOWN_MLA_PREFILLS",
    "PLATFORM_DISTRIBUTIONS",
    "KnownBackend",
]

PLATFORM_DISTRIBUTIONS = MappingProxyType(
    {
        Vendor.NVIDIA: "attn-cuda",
        Vendor.AMD: "attn-rocm",
        Vendor.INTEL: "attn-xpu",
        Vendor.CPU: "attn-cpu",
    }
)
"""The first-party package that brings the platform of a vendor's devices."""

_N, _A, _I, _C = Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL, Vendor.CPU


@dataclass(frozen=True, slots=True)
class KnownBackend:
    """One known name.

    Attributes:
        family: "mha", "mla", "sparse_mla", "mla_prefill", "recurrent" or "placeholder".
        vendors: whose devices it is for.
        kernels: where its kernels come from.
        is_planned: whether attn intends to provide it.
    """

    family: str
    vendors: tuple[Vendor, ...]
    kernels: str
    is_planned: bool = False

    @property
    def plan(self) -> str:
        """Whether attn intends to provide it, and in which package."""
        if not self.is_planned:
            return "not planned"
        if set(self.vendors) == set(Vendor):
            return "planned for attn-torch"
        return f"planned for {', '.join(PLATFORM_DISTRIBUTIONS[v] for v in self.vendors)}"


_ALL = (_N, _A, _I, _C)

KNOWN_BACKENDS = MappingProxyType(
    {
        "TORCH_SDPA": KnownBackend("mha", _ALL, "torch scaled_dot_product_attention", True),
        "FLEX_ATTENTION": KnownBackend("mha", _ALL, "torch flex_attention", True),
        "FLASH_ATTN": KnownBackend("mha", (_N,), "FlashAttention 2, 3 and 4", True),
        "FLASH_ATTN_DIFFKV": KnownBackend("mha", (_N,), "FlashAttention, D and Dv differ", True),
        "TRITON_ATTN": KnownBackend("mha", (_N, _A, _I), "Triton", True),
        "TRITON_ATTN_DIFFKV": KnownBackend("mha", (_N, _A), "Triton; here TRITON_ATTN serves it"),
        "ROCM_ATTN": KnownBackend("mha", (_A,), "HIP paged attention and Triton", True),
        "ROCM_AITER_FA": KnownBackend("mha", (_A,), "AITER", True),
        "ROCM_AITER_UNIFIED_ATTN": KnownBackend("mha", (_A,), "AITER's Triton kernels", True),
        "FLASHINFER": KnownBackend("mha", (_N,), "FlashInfer", True),
        "FLASHINFER_TRTLLM": KnownBackend("mha", (_N,), "FlashInfer: trtllm-gen, XQA", True),
        "XPU_FLASH_ATTN": KnownBackend("mha", (_I,), "Intel XPU kernels", True),
        "IPEX": KnownBackend("mha", (_I, _C), "intel-extension-for-pytorch 2.8", True),
        "CPU_ATTN": KnownBackend("mha", (_C,), "native C++", True),
        "HPC_ATTN": KnownBackend("mha", (_N,), "hpc-ops, one model family"),
        "TURBOQUANT": KnownBackend("mha", (_N, _A, _I), "Triton over a compressed cache"),
        "MINIMAX_M3_SPARSE": KnownBackend("mha", (_N, _A), "block-sparse, one model family"),
        "TORCH_MLA": KnownBackend("mla", _ALL, "torch", True),
        "TRITON_MLA": KnownBackend("mla", (_N, _A, _I), "Triton", True),
        "FLASHMLA": KnownBackend("mla", (_N,), "FlashMLA", True),
        "FLASHINFER_MLA": KnownBackend("mla", (_N,), "FlashInfer", True),
        "FLASH_ATTN_MLA": KnownBackend("mla", (_N,), "FlashAttention 3", True),
        "CUTLASS_MLA": KnownBackend("mla", (_N,), "CUTLASS", True),
        "TOKENSPEED_MLA": KnownBackend("mla", (_N,), "tokenspeed_mla"),
        "CPU_MLA": KnownBackend("mla", (_C,), "native C++", True),
        "ROCM_AITER_MLA": KnownBackend("mla", (_A,), "AITER", True),
        "ROCM_AITER_TRITON_MLA": KnownBackend("mla", (_A,), "AITER's Triton kernels"),
        "ROCM_AITER_MLA_SPARSE": KnownBackend("sparse_mla", (_A,), "AITER"),
        "XPU_MLA_SPARSE": KnownBackend("sparse_mla", (_I,), "Triton"),
        "FLASHINFER_MLA_SPARSE": KnownBackend("sparse_mla", (_N,), "FlashInfer"),
        "FLASHINFER_MLA_SPARSE_SM120": KnownBackend("sparse_mla", (_N,), "FlashInfer"),
        "FLASHINFER_MLA_SPARSE_DSV4": KnownBackend("sparse_mla", (_N,), "FlashInfer"),
        "FLASHMLA_SPARSE": KnownBackend("sparse_mla", (_N,), "FlashMLA"),
        "FLASHMLA_SPARSE_DSV4": KnownBackend("sparse_mla", (_N,), "FlashMLA"),
        "ROCM_FLASHMLA_SPARSE_DSV4": KnownBackend("sparse_mla", (_A,), "AITER"),
        "FLASH_ATTN_MLA_SPARSE": KnownBackend("sparse_mla", (_N,), "FlashAttention 3"),
        "NO_ATTENTION": KnownBackend("placeholder", (), "a name without a module in vLLM 0.25.1"),
        "CUSTOM": KnownBackend("placeholder", (), "vLLM's one slot for third parties"),
    }
)
"""Attention backends by name."""

KNOWN_MAMBA_BACKENDS = MappingProxyType(
    {
        "MAMBA1": KnownBackend("recurrent", (_N, _A), "selective scan"),
        "MAMBA2": KnownBackend("recurrent", (_N, _A), "chunked state-space scan"),
        "SHORT_CONV": KnownBackend("recurrent", (_N, _A), "causal convolution"),
        "LINEAR": KnownBackend("recurrent", (_N, _A), "linear attention"),
        "GDN_ATTN": KnownBackend("recurrent", (_N, _A), "gated delta net"),
        "CUSTOM": KnownBackend("placeholder", (), "vLLM's one slot for third parties"),
    }
)
"""Recurrent backends by name."""

KNOWN_MLA_PREFILLS = MappingProxyType(
    {
        "TORCH_SDPA": KnownBackend("mla_prefill", _ALL, "torch scaled_dot_product_attention", True),
        "TRITON": KnownBackend("mla_prefill", (_N, _A, _I), "Triton", True),
        "FLASH_ATTN": KnownBackend("mla_prefill", (_N,), "FlashAttention 2, 3 and 4", True),
        "TRTLLM_RAGGED": KnownBackend("mla_prefill", (_N,), "FlashInfer: trtllm-gen", True),
        "FLASHINFER": KnownBackend("mla_prefill", (_N,), "FlashInfer", True),
        "ROCM_AITER_FA": KnownBackend("mla_prefill", (_A,), "AITER", True),
        "CPU_ATTN": KnownBackend("mla_prefill", (_C,), "native C++", True),
        "TOKENSPEED_MLA": KnownBackend("mla_prefill", (_N,), "tokenspeed_mla"),
        "CUSTOM": KnownBackend("placeholder", (), "vLLM's one slot for third parties"),
    }
)
"""Kernels that prefill over latents, by name (vLLM 0.25.1's and attn's own)."""
