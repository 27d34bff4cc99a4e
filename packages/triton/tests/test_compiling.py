"""What compilation is told about arguments, and that it needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.interpreter

COMPILE = """
from attn_triton.kernels.compiling import compile_variant
from attn_triton.variants import all_variants
for arch, stage in (("sm_90", "ptx"), ("gfx942", "amdgcn"), ("gfx1100", "amdgcn")):
    found = next(item for item in all_variants(arch) if item.name == "kv-write-bf16")
    print(compile_variant(found, arch).asm[stage])
"""
WIDE = (r"ld\.global\.v4\.b32", r"global_load_dwordx4", r"global_load_b128")


def test_rows_are_moved_16_bytes_at_a_time_on_any_gpu(tmp_path: Path) -> None:
    # In a process of its own: kernels made under TRITON_INTERPRET cannot be compiled.
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for wide in WIDE:
        assert re.search(wide, run.stdout)


def test_kinds_of_arguments() -> None:
    from attn_triton.kernels.compiling import Kind, kind_of

    memory = torch.zeros(64, dtype=torch.bfloat16)
    assert memory.data_ptr() % 16 == 0
    assert kind_of(memory, "") == Kind("*bf16", True)
    assert kind_of(memory[1:], "") == Kind("*bf16", False)
    assert kind_of(memory.view(torch.float8_e4m3fn), "") == Kind("*fp8e4nv", True)
    assert kind_of(None, "") == Kind("constexpr")
    assert kind_of(7, "") == Kind("i32")
    assert kind_of(7, "i64") == Kind("i64")
    assert kind_of(0.5, "") == Kind("fp32")


def test_targets() -> None:
    from attn_triton.kernels.compiling import target_of

    assert (target_of("sm_90").backend, target_of("sm_90").arch) == ("cuda", 90)
    assert (target_of("gfx942").arch, target_of("gfx942").warp_size) == ("gfx942", 64)
    assert target_of("gfx1201").warp_size == 32
