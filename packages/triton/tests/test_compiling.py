"""What compilation is told about arguments, and that it needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_triton_launches_with_run_time_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher is made without constants where it is known to need no place for them."""
    import triton

    from attn_triton.kernels import compiling

    names = ["x_ptr", "count", "absent", "BLOCK"]
    kinds = {
        "x_ptr": compiling.Kind("*fp32", True),
        "count": compiling.Kind("i32"),
        "absent": compiling.Kind("constexpr"),
    }
    places = {"cuda": ("*fp32", "i32", "constexpr"), "xpu": None}
    source = object()
    monkeypatch.setattr(compiling, "_source", lambda kernel: lambda *given: source)
    for backend, expected in places.items():
        made = SimpleNamespace(
            src=source, metadata=SimpleNamespace(target=SimpleNamespace(backend=backend))
        )
        monkeypatch.setattr(triton, "compile", lambda *given, made=made, **rest: made)
        kernel: Any = SimpleNamespace(arg_names=names)
        found: Any = compiling.compile_kernel(kernel, kinds, {"BLOCK": 8}, options={})
        if expected is None:
            assert found.src is source
        else:
            assert tuple(found.src.signature.items()) == tuple(zip(names, expected, strict=False))
            assert not found.src.constants


@pytest.mark.parametrize(
    ("backend", "version", "scratch", "is_direct", "places"),
    [
        ("cuda", "3.6.0", 0, True, 0),
        ("cuda", "3.6.0", 64, False, 0),
        ("cuda", "3.7.1", 0, False, 0),
        ("hip", "3.6.0", 0, False, 0),
        ("xpu", "3.6.0", 0, False, 2),
    ],
)
def test_how_a_kernel_is_launched(
    backend: str,
    version: str,
    scratch: int,
    is_direct: bool,
    places: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the launcher's own function where its arguments are known and no memory is asked for."""
    import triton

    from attn_triton.kernels import compiling

    monkeypatch.setattr(triton, "__version__", version)
    run = SimpleNamespace(
        launch="its own function",
        launch_cooperative_grid=False,
        launch_pdl=True,
        global_scratch_size=scratch,
        profile_scratch_size=0,
    )
    compiled: Any = SimpleNamespace(
        run=run,
        function="code",
        packed_metadata=(4, 1, 0),
        metadata=SimpleNamespace(target=SimpleNamespace(backend=backend)),
    )
    call, head, tail = compiling.launch_call(compiled, 2)
    hooks = ((4, 1, 0), None, None, None)
    attributes = (False, True, None, None) if is_direct else ()
    assert call == ("its own function" if is_direct else run)
    assert head == ("code", *attributes, *hooks)
    assert tail == (None,) * places
