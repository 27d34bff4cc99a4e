"""Vendor libraries, found by metadata and described by probes, on stubs of real releases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attn_shared.inventory import VendorBuild, VendorEntry, VendorStatus, probe, scan
from attn_xpu._vendor import ipex, triton, vllm_xpu_kernels
from attn_xpu.platform import XpuPlatform

InstallStub = Callable[..., None]
SPECS = XpuPlatform().vendor_specs()


def look(name: str) -> VendorEntry:
    """Scan, then probe what was found, as the selector does."""
    return probe(SPECS, [name], scan(SPECS)).get(name)


def build_of(entry: VendorEntry) -> VendorBuild:
    assert entry.build is not None, entry.error
    return entry.build


def test_intels_kernels(install_stub: InstallStub) -> None:
    install_stub("vllm-xpu-kernels", "0.1.16.2", "vllm_xpu_kernels")
    entry = look("vllm_xpu_kernels")
    build = build_of(entry)
    assert (entry.status, entry.version) == (VendorStatus.LOADED, "0.1.16.2")
    assert (build.kernel_lse_base, build.flag("cache_ops")) == ("e", "off")
    assert {
        "flash_attn_varlen_func.block_table",
        "flash_attn_varlen_func.s_aux",
        "flash_attn_varlen_func.out",
        "flash_attn_varlen_func.num_splits_kv",
    } <= build.optional_arguments


def test_intels_cache_operators(install_stub: InstallStub, monkeypatch: pytest.MonkeyPatch) -> None:
    install_stub("vllm-xpu-kernels", "0.1.16.2", "vllm_xpu_kernels")
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels._C", ModuleType("vllm_xpu_kernels._C"))
    assert build_of(look("vllm_xpu_kernels")).flag("cache_ops") == "on"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("libze_loader.so.1: cannot open shared object file", "libze_loader.so.1: cannot open"),
        (None, "it does not say why"),
    ],
)
def test_intels_kernels_without_their_driver_import_and_are_broken_all_the_same(
    install_stub: InstallStub, monkeypatch: pytest.MonkeyPatch, reason: str | None, words: str
) -> None:
    install_stub("vllm-xpu-kernels", "0.1.16.2", "vllm_xpu_kernels")
    import vllm_xpu_kernels.flash_attn_interface as interface

    monkeypatch.setattr(interface, "FA2_AVAILABLE", False)
    monkeypatch.setattr(interface, "FA2_UNAVAILABLE_REASON", reason)
    entry = look("vllm_xpu_kernels")
    assert entry.status is VendorStatus.BROKEN
    assert words in str(entry.error)


def test_ipex_with_its_torch(install_stub: InstallStub, monkeypatch: pytest.MonkeyPatch) -> None:
    install_stub("intel-extension-for-pytorch", "2.8.10+xpu", "ipex")
    monkeypatch.setattr(torch, "__version__", "2.8.0+xpu")
    build = build_of(look("ipex"))
    assert (build.version, build.kernel_lse_base) == ("2.8.10+xpu", None)
    assert build.flag("build") == "xpu"
    assert {
        "flash_attn_varlen_func.window_size_left",
        "flash_attn_varlen_func.softcap",
        "single_query_cached_kv_attention.window_size",
    } <= build.optional_arguments


def test_ipex_with_another_torch_is_not_imported_since_it_would_end_the_process(
    install_stub: InstallStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub("intel-extension-for-pytorch", "2.8.0")
    (tmp_path / "intel_extension_for_pytorch").mkdir()
    text = "import sys\nsys.exit(127)\n"
    (tmp_path / "intel_extension_for_pytorch/__init__.py").write_text(text)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    entry = look("ipex")
    assert entry.status is VendorStatus.BROKEN
    assert "2.8.0 needs torch 2.8, and this is torch 2.13.0+cpu" in str(entry.error)
    assert "intel_extension_for_pytorch" not in sys.modules


def test_ipex_that_ends_the_process_anyway_is_broken(
    install_stub: InstallStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub("intel-extension-for-pytorch", "2.8.0")
    (tmp_path / "intel_extension_for_pytorch").mkdir()
    text = "import sys\nsys.exit(127)\n"
    (tmp_path / "intel_extension_for_pytorch/__init__.py").write_text(text)
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert "ended the process while it was imported (exit status 127)" in str(look("ipex").error)


def test_ipex_beside_transformers_5_is_broken_with_the_cause(
    install_stub: InstallStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub("intel-extension-for-pytorch", "2.8.0")
    (tmp_path / "intel_extension_for_pytorch").mkdir()
    text = "def forward() -> MoeModelOutputWithPast: ...\n"
    (tmp_path / "intel_extension_for_pytorch/__init__.py").write_text(text)
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    entry = look("ipex")
    assert entry.status is VendorStatus.BROKEN
    assert "'MoeModelOutputWithPast' is not defined" in str(entry.error)
    assert "does not load with 5" in str(entry.error)


def test_triton_names_its_back_ends(install_stub: InstallStub) -> None:
    install_stub("triton-xpu", "3.5.0", "triton")
    entry = look("triton")
    assert (entry.distribution, build_of(entry).flag("backends")) == ("triton-xpu", "intel")


def test_triton_of_the_package_index_has_no_intel_back_end(
    install_stub: InstallStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub("triton", "3.7.1")
    backends = ModuleType("triton.backends")
    backends.backends = {"amd": object(), "nvidia": object()}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.backends", backends)
    assert "compiles for amd, nvidia, not for intel" in str(look("triton").error)


def test_nothing_installed_is_absent_with_the_command(install_stub: InstallStub) -> None:
    entry = look("vllm_xpu_kernels")
    assert entry.status is VendorStatus.ABSENT
    assert 'pip install "attn-xpu[kernels]"' in entry.describe()


@pytest.mark.parametrize("module", [ipex, triton, vllm_xpu_kernels])
def test_specs_point_at_their_probes(module: ModuleType) -> None:
    assert module.SPEC.probe == f"{module.__name__}:probe"
    assert module.SPEC in SPECS
