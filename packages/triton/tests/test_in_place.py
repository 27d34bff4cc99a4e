"""Merging in place: no warp stores what another one has yet to load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_triton.merge import merge_attn_states, merge_into

COMPILE = """
from attn_triton.kernels.compiling import compile_variant
from attn_triton.variants import all_variants

for variant in all_variants("sm_90"):
    if variant.name == "merge-bf16-d128-in-place":
        print(compile_variant(variant, "sm_90").asm["ptx"])
"""


@pytest.mark.interpreter
def test_a_barrier_stands_between_loads_and_stores(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    text = run.stdout
    assert text.rindex("ld.global") < text.index("bar.sync") < text.index("st.global")


@pytest.mark.cuda
@pytest.mark.parametrize("num_heads", [3, 5, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_merge_in_place_is_one_into_new_tensors(num_heads: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for seed in range(50):
        generator = torch.Generator(device).manual_seed(seed)
        outputs = torch.randn(2, 333, num_heads, 128, device=device, generator=generator)
        lses = torch.randn(2, num_heads, 333, device=device, generator=generator)
        found = outputs[1].to(dtype)
        expected = merge_attn_states(outputs[0], lses[0], found.float(), lses[1])
        merge_into(outputs[0], lses[0], found, lses[1])
        assert torch.equal(outputs[0], expected[0]), f"seed {seed}"
        assert torch.equal(lses[0], expected[1]), f"seed {seed}"
