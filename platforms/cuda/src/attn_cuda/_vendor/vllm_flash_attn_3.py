"""FlashAttention 3 of an installed vLLM: output argument, softcap, value heads of any width."""

from __future__ import annotations

from attn_cuda._vendor import vllm_flash_attn
from attn_shared.inventory import VendorBuild, VendorSpec

__all__ = ["SPEC", "probe"]

SPEC = VendorSpec(
    name="vllm_flash_attn_3",
    distributions=(vllm_flash_attn.DISTRIBUTION,),
    module="vllm.vllm_flash_attn",
    install="pip install vllm",
    probe="attn_cuda._vendor.vllm_flash_attn_3:probe",
)


def probe() -> VendorBuild:
    """Load the interface and its extension, and say what they take.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    return vllm_flash_attn.describe(3)
