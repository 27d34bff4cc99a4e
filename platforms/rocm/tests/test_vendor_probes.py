"""Vendor libraries, found by metadata and described by probes, on stubs of real releases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from attn_rocm._vendor import aiter, flash_attn, triton
from attn_rocm.platform import RocmPlatform
from attn_shared.inventory import VendorBuild, VendorEntry, VendorStatus, probe, scan

InstallStub = Callable[..., None]
SPECS = RocmPlatform().vendor_specs()


def look(name: str) -> VendorEntry:
    """Scan, then probe what was found, as the selector does."""
    return probe(SPECS, [name], scan(SPECS)).get(name)


def build_of(entry: VendorEntry) -> VendorBuild:
    assert entry.build is not None, entry.error
    return entry.build


def test_the_aiter_wheel(install_stub: InstallStub) -> None:
    install_stub("amd-aiter", "0.1.7.post2.dev18", "aiter_0_1_7")
    entry = look("aiter")
    build = build_of(entry)
    assert (entry.status, entry.version) == (VendorStatus.LOADED, "0.1.7.post2.dev18")
    assert build.kernel_lse_base == "e"
    assert build.flag("window_size") == "2"
    assert build.flag("unified_attention") == "aiter.ops.triton.unified_attention"
    assert build.optional_arguments == {
        "flash_attn_varlen_func.block_table",
        "flash_attn_varlen_func.out",
        "flash_attn_varlen_func.return_lse",
        "mha_batch_prefill_func.out",
        "mha_batch_prefill_func.return_lse",
        "mla_decode_fwd.kv_last_page_lens",
        "paged_attention_v1.out",
        "paged_attention_v1.sliding_window",
        "unified_attention.block_table",
        "unified_attention.k_descale",
        "unified_attention.out",
        "unified_attention.sinks",
        "unified_attention.v_descale",
    }


def test_aiters_repository_is_ahead_of_its_wheel(install_stub: InstallStub) -> None:
    install_stub("amd-aiter", "0.2.0.dev1", "aiter_head")
    build = build_of(look("aiter"))
    assert build.flag("window_size") == "3"
    assert build.flag("unified_attention") == "aiter.ops.triton.attention.unified_attention"
    assert {
        "flash_attn_varlen_func.sink_ptr",
        "mha_batch_prefill_func.kv_last_page_lens",
        "mha_batch_prefill_func.block_table",
        "mha_batch_prefill_func.seqlen_k",
        "mla_decode_fwd.page_size",
        "mla_decode_fwd.return_lse",
        "unified_attention.q_scales",
        "unified_attention.shuffled_kv_cache",
    } <= build.optional_arguments


def test_aiter_without_rocm_is_broken_in_its_own_words(
    install_stub: InstallStub, tmp_path: Path
) -> None:
    install_stub("amd-aiter", "0.1.7.post2.dev18")
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter/__init__.py").write_text("raise FileNotFoundError('ROCm version file')")
    entry = look("aiter")
    assert entry.status is VendorStatus.BROKEN
    assert "FileNotFoundError: ROCm version file" in str(entry.error)


def test_a_part_of_aiter_that_fails_is_not_taken_for_an_absent_one(
    install_stub: InstallStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub("amd-aiter", "0.2.0.dev1", "aiter_head")
    monkeypatch.setitem(sys.modules, "aiter.mla", None)
    assert look("aiter").status is VendorStatus.LOADED
    monkeypatch.delitem(sys.modules, "aiter.mla")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "aiter.mla":
                raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    entry = look("aiter")
    assert entry.status is VendorStatus.BROKEN
    assert "No module named 'triton'" in str(entry.error)


@pytest.mark.parametrize(("is_triton", "kernels"), [(False, "ck"), (True, "triton")])
def test_flash_attention_says_which_kernels_it_chose(
    install_stub: InstallStub,
    monkeypatch: pytest.MonkeyPatch,
    is_triton: bool,
    kernels: str,
) -> None:
    install_stub("flash-attn", "2.8.3", "flash_attn")
    import flash_attn.flash_attn_interface as interface

    monkeypatch.setattr(interface, "USE_TRITON_ROCM", is_triton)
    build = build_of(look("flash_attn"))
    assert build.flag("kernels") == kernels
    assert "flash_attn_varlen_func.block_table" in build.optional_arguments


def test_triton_names_its_back_ends(install_stub: InstallStub) -> None:
    install_stub("triton", "3.7.1", "triton")
    assert build_of(look("triton")).flag("backends") == "amd,nvidia"


def test_triton_without_an_amd_back_end_is_broken(
    install_stub: InstallStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub("triton", "3.7.1")
    backends = ModuleType("triton.backends")
    backends.backends = {"nvidia": object()}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.backends", backends)
    assert "compiles for nvidia, not for amd" in str(look("triton").error)


def test_nothing_installed_is_absent_with_the_command(install_stub: InstallStub) -> None:
    entry = look("aiter")
    assert entry.status is VendorStatus.ABSENT
    assert 'pip install "attn-rocm[aiter]"' in entry.describe()


@pytest.mark.parametrize("module", [aiter, flash_attn, triton])
def test_specs_point_at_their_probes(module: ModuleType) -> None:
    assert module.SPEC.probe == f"{module.__name__}:probe"
    assert module.SPEC in SPECS
