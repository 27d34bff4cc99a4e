"""The library as an inventory entry: absent, broken, loaded."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from attn_cpu_testing import needs_kernels

from attn_cpu import _ops
from attn_cpu._vendor import attn_cpu_kernels
from attn_cpu.platform import CpuPlatform
from attn_shared.inventory import Inventory, VendorEntry, VendorStatus, probe, scan

SPEC = attn_cpu_kernels.SPEC
OURS = attn_cpu_kernels.__name__


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """`load` without the memory of what it did in this process."""
    monkeypatch.setattr(attn_cpu_kernels, "load", attn_cpu_kernels.load.__wrapped__)
    return monkeypatch


def test_the_platform_declares_it() -> None:
    assert CpuPlatform().vendor_specs() == (SPEC,)


def test_absent_where_the_wheel_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (entry,) = scan([SPEC]).entries
    assert entry.status is VendorStatus.ABSENT
    assert "attn_cpu_kernels is not installed" in entry.describe()
    assert "ATTN_CPU_KERNELS=required pip install" in entry.describe()


@pytest.mark.parametrize("version", ["2.9.1+cpu", "2.8.0", "1.13.1"])
def test_an_older_torch_is_named(unloaded: pytest.MonkeyPatch, version: str) -> None:
    unloaded.setattr(torch, "__version__", version)
    present = Inventory((VendorEntry(name=SPEC.name, status=VendorStatus.PRESENT),))
    (entry,) = probe([SPEC], [SPEC.name], present).entries
    assert entry.status is VendorStatus.BROKEN
    assert f"need torch 2.10 or newer, and this is {version}" in (entry.error or "")


def _kernels(**values: object) -> ModuleType:
    plain = {"__version__": "0.1.0", "LIBRARY": "/nowhere.so", "TORCH": "2.13.0"}
    return SimpleNamespace(**(plain | values))  # type: ignore[return-value]


def test_kernels_of_another_version(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setattr(attn_cpu_kernels, "import_library", lambda name: _kernels(__version__="0.0.9"))
    with pytest.raises(ImportError, match=r"of attn-cpu 0\.0\.9, and this is .*build them again"):
        attn_cpu_kernels.load()


def test_a_library_that_torch_refuses(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setattr(attn_cpu_kernels, "import_library", lambda name: _kernels())
    with pytest.raises(ImportError, match=r"does not load kernels .* torch 2\.13\.0: .*nowhere"):
        attn_cpu_kernels.load()


@needs_kernels
def test_a_library_of_other_sources_is_refused_with_what_it_lacks(
    unloaded: pytest.MonkeyPatch,
) -> None:
    attn_cpu_kernels.load()
    unloaded.setattr(_ops, "OPS", (*_ops.OPS, "write_and_more"))
    with pytest.raises(
        ImportError, match=r"\.so lacks write_and_more: .* other sources .*reinstall by"
    ):
        attn_cpu_kernels.load()


@needs_kernels
def test_the_ops_that_are_required_are_those_of_the_library() -> None:
    attn_cpu_kernels.load()
    made = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("attn_cpu::")
    }
    assert made == set(_ops.OPS)
    assert not _ops.missing_ops()


@needs_kernels
def test_loaded_and_described() -> None:
    (entry,) = probe([SPEC], [SPEC.name], scan([SPEC])).entries
    assert entry.status is VendorStatus.LOADED
    assert entry.build is not None
    supported = (entry.build.flag("isa_supported") or "").split()
    assert entry.build.flag("isa") == supported[-1] or entry.build.flag("amx_permission") == "off"
    assert "generic" in (entry.build.flag("isa_built") or "").split()
    assert entry.build.flag("compiler")


def test_importing_loads_no_library() -> None:
    code = (
        "import sys, torch, attn_cpu.platform, attn_cpu.isa, attn_cpu.backends.cpu_attn\n"
        "assert 'attn_cpu_kernels' not in sys.modules\n"
        "assert not hasattr(torch.ops.attn_cpu, 'attention')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_kernels
def test_one_openmp_runtime_in_the_process() -> None:
    code = (
        "from attn_cpu._vendor.attn_cpu_kernels import load\n"
        "load()\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "paths = {line.split()[-1] for line in lines if 'omp' in line.split()[-1].lower()}\n"
        "runtimes = {p for p in paths if 'libgomp' in p or 'libiomp' in p or 'libomp' in p}\n"
        "assert len(runtimes) == 1, runtimes\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
