"""Kernels noted in steps that launch nothing, and compiled without a GPU where it will look."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_shared.errors import InvalidInputError, VendorMissingError
from attn_triton.ahead import TritonCompiler, compile_lines, main

pytestmark = pytest.mark.interpreter

NOTE = """
import sys
from contextlib import nullcontext
import torch
from attn_triton import launch
from attn_triton.ahead import TritonCompiler
from attn_triton.merge import merge_attn_states

launch._runtime = lambda: (lambda index: 0, lambda: None)  # tensors on the CPU stand for a GPU's
launch._made_current = lambda device: nullcontext()
compiler = TritonCompiler()
with compiler.noting() as missing:
    for size in (64, 128, 64):
        half = torch.zeros(3, 2, size), torch.zeros(2, 3)
        merge_attn_states(*half, *half)
    print(len(missing), sorted(name.split()[0] for name in missing))
print(compiler.write(sys.argv[1]))
"""
LOOK_UP = """
import sys
from contextlib import nullcontext
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from attn_triton import launch
from attn_triton.kernels import compiling
from attn_triton.merge import merge_attn_states

driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
launch._runtime = lambda: (lambda index: 0, lambda: None)
launch._made_current = lambda device: nullcontext()
compiling.launch_call = lambda compiled, num_constants: ()
launch.Handle = lambda *compiled: lambda grid, *args: None
hits = []
triton.knobs.compilation.listener = lambda **found: hits.append(found["cache_hit"])
for size in (64, 128):
    half = torch.zeros(3, 2, size), torch.zeros(2, 3)
    merge_attn_states(*half, *half)
print(compiling.current_arch(), hits)
"""

STEPS = """
from contextlib import nullcontext
import torch
from attn_conformance.case import Case
from attn_conformance.engine import Engine
from attn_conformance.batch import make_batch
from attn_shared.spec import BuildConfig
from attn_triton import launch
from attn_triton.ahead import TritonCompiler
from attn_triton.backends.triton_attn import TritonAttentionBackend
from attn_triton.kernels import compiling

launch._runtime = compiling.driver_calls = lambda: (lambda index: 0, lambda: None)
launch._made_current = lambda device: nullcontext()
compiler = TritonCompiler()
case = Case(name="mixed", query_lens=(1, 3, 40), seq_lens=(300, 9, 50))
batch = make_batch(case, torch.device("cpu"), fp8_e4m3_dtype=torch.float8_e4m3fn)
counts = []
with compiler.noting() as missing:
    engine = Engine.of(TritonAttentionBackend, batch, BuildConfig())
    for with_lse in (False, True):
        engine.run(batch, with_lse=with_lse)
        counts.append(len(missing))
print(counts, sorted({name.split()[0] for name in missing}))
"""


def run(cache: Path, *arguments: str) -> str:
    """Run Python where kernels are not interpreted, and return what it prints."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_was_noted_and_compiled_is_what_a_gpu_looks_up(tmp_path: Path) -> None:
    kernels, cache = str(tmp_path / "kernels.jsonl"), tmp_path / "cache"
    said = run(cache, "-c", NOTE, kernels).splitlines()
    assert said == ["2 ['merge_states', 'merge_states']", "2"]
    assert not cache.exists()
    command = ("-m", "attn_triton.ahead", kernels, "--arch", "sm_90", "--jobs", "2")
    assert run(cache, *command).startswith("2 of 2 kernels")
    assert run(cache, "-c", LOOK_UP).split(maxsplit=1) == ["sm_90", "[True, True]\n"]


def test_steps_with_an_lse_and_without_run_the_same_kernels(tmp_path: Path) -> None:
    said = run(tmp_path, "-c", STEPS)
    assert said == "[5, 5] ['combine', 'decode', 'plan_step', 'prefill', 'write_kv']\n"


def test_a_kernel_that_does_not_compile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line: dict[str, object] = {"kernel": "attn_triton.kernels.merge:nothing"}
    line |= {"kinds": {}, "constants": {}, "options": {}}
    path = tmp_path / "kernels.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert main([str(path), "--arch", "sm_90", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "0 of 1" in said
    assert "nothing for sm_90" in said


def test_nothing_noted_is_nothing_compiled() -> None:
    compiler = TritonCompiler()
    with compiler.noting() as missing:
        assert not missing
    compiler.compile(1)
    assert compile_lines([]) == []
    with pytest.raises(InvalidInputError, match="jobs is 0"):
        compile_lines(["{}"], jobs=0)


def test_a_failure_within_a_backend_is_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = TritonCompiler()
    compiler._note(json.dumps({"kernel": "module:decode"}))
    monkeypatch.setattr("attn_triton.ahead.compile_lines", lambda lines, jobs: ["decode: no"])
    with pytest.raises(VendorMissingError, match="decode: no"):
        compiler.compile(1)
