"""Importing the packages, and asking which platforms there are, loads no vendor and no driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PACKAGES = (
    "attn_shared",
    "attn_torch",
    "attn_triton",
    "attn_cpu",
    "attn_cuda",
    "attn_rocm",
    "attn_xpu",
)
VENDORS = {
    "aiter",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_interface",
    "flash_mla",
    "flashinfer",
    "intel_extension_for_pytorch",
    "triton",
    "vllm",
    "vllm_xpu_kernels",
}
HEAVY = {"rich", "torch._dynamo", "torch._inductor", "transformers", "typer"}

REPORT = """
import json, sys, torch
before = set(sys.modules)
{statements}
print(json.dumps({{
    "loaded": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "xpu": torch.xpu.is_initialized(),
}}))
"""

IMPORT_PACKAGES = f"import {', '.join(PACKAGES)}"
IMPORT_SELECTOR = "import attn_shared.selector, attn_shared.registry, attn_shared.layer"
IMPORT_OPERATIONS = "import attn_triton.kv_write, attn_triton.launch, attn_triton.merge"
LOAD_PLATFORMS = """
from importlib.metadata import entry_points
assert len([point.load() for point in entry_points(group="attn.platforms")]) >= 4
"""


def in_fresh_process(statements: str) -> dict[str, object]:
    """What these statements load on top of torch, and whether they started a driver."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(statements=statements)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": ""},
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(IMPORT_PACKAGES, id="packages"),
        pytest.param(IMPORT_SELECTOR, id="selector"),
        pytest.param(IMPORT_OPERATIONS, id="operations"),
        pytest.param(LOAD_PLATFORMS, id="platforms"),
    ],
)
def test_loads_no_vendor_and_starts_no_driver(statements: str) -> None:
    report = in_fresh_process(statements)
    loaded = report["loaded"]
    assert isinstance(loaded, list)
    tops = {str(name).split(".")[0] for name in loaded}
    assert not tops & VENDORS
    assert not set(loaded) & HEAVY
    assert not report["cuda"]
    assert not report["xpu"]
