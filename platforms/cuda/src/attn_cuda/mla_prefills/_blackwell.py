"""What FlashInfer's two prefills over latents share: Blackwell, a few widths, an LSE in bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_shared.capability import Capability, Reason, Rule
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.limits import DeviceLimit
from attn_shared.mla_prefill import prefill_capability
from attn_shared.request import AttentionRequest, MLADims

__all__ = ["DEEPSEEK", "blackwell_prefill", "natural"]

DEEPSEEK = (128, 64, 128)


def blackwell_prefill(
    inventory: Inventory, widths: Sequence[tuple[int, int, int]], *, dtypes: frozenset[torch.dtype]
) -> Capability:
    """Return the capability of kernels for some widths.

    Args:
        inventory: what is installed.
        widths: (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) that there are kernels for.
        dtypes: compute dtypes.
    """

    def check(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        dims = request.mla or MLADims()
        found = (dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
        if found in widths:
            return None
        return Reason(
            code="mla_dims",
            value=" ".join(map(str, found)),
            allowed=" | ".join(" ".join(map(str, each)) for each in widths)
            + " (qk_nope_head_dim, qk_rope_head_dim, v_head_dim)",
        )

    is_present = inventory.get("flashinfer").status is VendorStatus.PRESENT
    return prefill_capability(
        (DeviceLimit(vendor=Vendor.NVIDIA, families=(10,)),),
        dtypes,
        rules=(Rule(name="mla_dims", check=check),),
        needs_probe=("flashinfer",) if is_present else (),
    )


def natural(lse: Tensor) -> Tensor:
    """Return an LSE (T, H) of base 2 as (H, T), a natural logarithm."""
    return (lse * math.log(2)).T
