"""See that attn-cpu without kernels says so, and that the torch backends serve.

    python ci/check_pure_wheel.py

Run in an environment with a wheel of attn-cpu that was built with ATTN_CPU_KERNELS=off.
"""

from __future__ import annotations

import sys

import torch

from attn_shared.errors import VendorMissingError
from attn_shared.layer import Attention

__all__ = ["main"]


def main() -> int:
    """Return 0 if a layer by default runs on torch, and CPU_ATTN by name is refused with advice."""
    layer = Attention(num_heads=4, num_kv_heads=2, head_size=32, dtype=torch.float32)
    print(layer.selection)
    verdict = str(layer.selection)
    try:
        Attention(num_heads=4, num_kv_heads=2, head_size=32, backend="CPU_ATTN")
    except VendorMissingError as error:
        refusal = str(error)
        print(refusal)
    else:
        return 1
    is_advised = all("attn_cpu_kernels is not installed" in text for text in (verdict, refusal))
    return 0 if is_advised and layer.selection.chosen == "TORCH_SDPA" else 1


if __name__ == "__main__":
    sys.exit(main())
