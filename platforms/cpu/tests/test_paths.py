from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_cpu._calls import LIBRARY
from attn_cpu.backends.cpu_attn import CpuAttnBackend
from attn_shared.device import preset
from attn_shared.inventory import Inventory, VendorBuild, VendorEntry, VendorStatus
from attn_shared.request import AttentionRequest


def told(device: str, dtype: torch.dtype, inventory: Inventory | None = None) -> tuple[str, str]:
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}
    request = AttentionRequest(**sizes, dtype=dtype)
    (path,) = CpuAttnBackend.kernel_paths(request, preset(device), inventory or Inventory())
    return path.kernel, path.why


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        ("spr", torch.bfloat16, "level amx_bf16, products on AMX tiles"),
        ("spr", torch.float16, "level amx_bf16, vectors of 16 lanes"),
        ("graviton4", torch.bfloat16, "level neon, vectors of 4 lanes"),
        ("genericcpu", torch.float32, "level avx2, vectors of 8 lanes"),
    ],
)
def test_the_level_follows_from_the_instruction_sets(
    device: str, dtype: torch.dtype, kernel: str
) -> None:
    found, why = told(device, dtype)
    assert found == kernel
    assert preset(device).name in why


def test_what_the_library_found_here_goes_before_what_the_device_has() -> None:
    build = VendorBuild(version="1.0", flags=(("isa", "avx512_bf16"),))
    entry = VendorEntry(name=LIBRARY, status=VendorStatus.LOADED, install="", build=build)
    found, why = told("spr", torch.bfloat16, Inventory((entry,)))
    assert found == "level avx512_bf16, queries times keys by pairs of bfloat16"
    assert "built and runs here" in why
