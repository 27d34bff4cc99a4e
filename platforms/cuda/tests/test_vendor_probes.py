"""Vendor libraries, found by metadata and described by probes, on stubs of real releases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.vendors.fa3_fwd import FA3_FWD
from attn_conformance.stubs.vendors.flash_attn_2 import FLASH_ATTN_2
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3
from attn_conformance.stubs.vendors.flash_attn_4 import FLASH_ATTN_4
from attn_cuda._vendor import (
    fa3_fwd,
    flash_attn,
    flash_attn_3,
    flash_attn_4,
    flash_mla,
    flashinfer,
    triton,
    vllm_flash_attn_2,
    vllm_flash_attn_3,
)
from attn_cuda.platform import CudaPlatform
from attn_cuda.toolkit import Toolkit
from attn_shared.inventory import VendorBuild, VendorEntry, VendorStatus, probe, scan

InstallStub = Callable[..., None]
SPECS = CudaPlatform().vendor_specs()

# name, stub with the release's signatures, arguments that it has, and has not
STUBBED = [
    pytest.param(
        "flash_attn",
        FLASH_ATTN_2,
        {"flash_attn_varlen_func.block_table", "flash_attn_with_kvcache.softcap"},
        {"flash_attn_varlen_func.seqused_k", "flash_attn_varlen_func.out"},
        id="flash-attn",
    ),
    pytest.param(
        "flash_attn_3",
        FLASH_ATTN_3,
        {
            "flash_attn_with_kvcache.page_table",
            "flash_attn_with_kvcache.sinks",
            "flash_attn_varlen_func.sinks",
            "get_scheduler_metadata.num_splits",
        },
        {"flash_attn_varlen_func.page_table", "flash_attn_with_kvcache.out"},
        id="tokenspeed-fa3",
    ),
    pytest.param(
        "fa3_fwd",
        FA3_FWD,
        {"flash_attn_with_kvcache.scheduler_metadata"},
        {"flash_attn_with_kvcache.sinks"},
        id="fa3-fwd",
    ),
    pytest.param(
        "flash_attn_4",
        FLASH_ATTN_4,
        {
            "flash_attn_varlen_func.page_table",
            "flash_attn_varlen_func.learnable_sink",
        },
        {"flash_attn_varlen_func.out"},
        id="flash-attn-4",
    ),
]

# name, distribution, version, stub, base of the LSE, arguments that it has, and has not
RELEASES = [
    pytest.param(
        "flashinfer",
        "flashinfer-python",
        "0.7.4",
        "flashinfer",
        "2",
        {
            "prefill.run.lse_base",
            "prefill.plan.fixed_split_size",
            "decode.run.sinks",
            "trtllm_batch_decode_with_kv_cache.cum_seq_lens_q",
        },
        {"decode.run.lse_base", "ragged.run.sinks"},
        id="flashinfer",
    ),
    pytest.param(
        "flash_mla",
        "sgl-flash-mla",
        "1.0.0",
        "sgl_flash_mla",
        "e",
        {"flash_mla_with_kvcache.use_legacy", "flash_mla_sparse_fwd.return_log2_lse"},
        set(),
        id="sgl-flash-mla",
    ),
    pytest.param(
        "flash_mla",
        "tokenspeed-flashmla",
        "1.0.0.post20260429",
        "tokenspeed_flashmla",
        "e",
        {"flash_mla_with_kvcache.indices"},
        {"flash_mla_with_kvcache.use_legacy", "flash_mla_with_kvcache.descale_q"},
        id="tokenspeed-flashmla",
    ),
    pytest.param("triton", "triton", "3.7.1", "triton", None, set(), {"jit.launch"}, id="triton"),
]


def look(name: str) -> VendorEntry:
    """Scan, then probe what was found, as the selector does."""
    return probe(SPECS, [name], scan(SPECS)).get(name)


def build_of(entry: VendorEntry) -> VendorBuild:
    assert entry.build is not None, entry.error
    return entry.build


@pytest.mark.parametrize(("name", "stub", "has", "has_not"), STUBBED)
def test_a_build_of_flash_attention_is_found_and_described(
    name: str, stub: VendorStub, has: set[str], has_not: set[str]
) -> None:
    with stub_vendor(stub):
        assert scan(SPECS).get(name).status is VendorStatus.PRESENT
        entry = look(name)
    build = build_of(entry)
    assert entry.status is VendorStatus.LOADED
    assert (entry.distribution, entry.version) == (stub.distribution, stub.version)
    assert build.kernel_lse_base == "e"
    assert has <= build.optional_arguments
    assert has_not.isdisjoint(build.optional_arguments)


@pytest.mark.parametrize(
    ("name", "distribution", "version", "stub", "lse_base", "has", "has_not"), RELEASES
)
def test_a_release_is_found_and_described(
    install_stub: InstallStub,
    name: str,
    distribution: str,
    version: str,
    stub: str,
    lse_base: str | None,
    has: set[str],
    has_not: set[str],
) -> None:
    install_stub(distribution, version, stub)
    assert scan(SPECS).get(name).status is VendorStatus.PRESENT
    entry = look(name)
    build = build_of(entry)
    assert entry.status is VendorStatus.LOADED
    assert (entry.distribution, entry.version) == (distribution, version)
    assert build.kernel_lse_base == lse_base
    assert has <= build.optional_arguments
    assert has_not.isdisjoint(build.optional_arguments)


@pytest.mark.parametrize(
    ("flag", "here", "there"),
    [
        ("pagedkv", "on", "off"),
        ("local", "on", "off"),
        ("softcap", "off", "on"),
        ("fp16", "on", "off"),
        ("hdim96", "off", "on"),
        ("sm8x", "off", "on"),
        ("hdimdiff64", "off", "on"),
        ("vcolmajor", "off", "off"),
        ("split", "on", "on"),
    ],
)
def test_two_builds_of_flash_attention_3_are_told_apart_by_their_flags(
    flag: str, here: str, there: str
) -> None:
    with stub_vendor(FLASH_ATTN_3, FA3_FWD):
        assert build_of(look("flash_attn_3")).flag(flag) == here
        assert build_of(look("fa3_fwd")).flag(flag) == there


def test_a_build_of_flash_attention_3_without_a_configuration_has_no_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stub_vendor(FLASH_ATTN_3):
        monkeypatch.setitem(sys.modules, "flash_attn_config", None)
        assert build_of(look("flash_attn_3")).flags == ()


def test_flash_attention_4_alone_is_not_flash_attention_2() -> None:
    with stub_vendor(FLASH_ATTN_4):
        assert look("flash_attn").status is VendorStatus.ABSENT
        assert look("flash_attn_4").status is VendorStatus.LOADED


def test_flash_attention_4_reports_its_compiler() -> None:
    compiler = VendorStub(distribution="nvidia-cutlass-dsl", version="4.8.1", modules={})
    with stub_vendor(FLASH_ATTN_4, compiler):
        assert build_of(look("flash_attn_4")).flag("cutlass_dsl") == "4.8.1"


def test_flash_mla_reports_its_second_set_of_kernels(install_stub: InstallStub) -> None:
    install_stub("sgl-flash-mla", "1.0.0", "sgl_flash_mla")
    assert build_of(look("flash_mla")).flag("legacy") == "on"


def test_flashinfer_reports_what_it_compiles_with_and_what_saves_it_from_that(
    install_stub: InstallStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_stub("flashinfer-python", "0.7.4", "flashinfer")
    install_stub("flashinfer-cubin", "0.7.4")
    for has_compiler, flag in ((False, "off"), (True, "on")):
        toolkit = Toolkit(path=tmp_path, version=(13, 0), has_compiler=has_compiler)
        monkeypatch.setattr(flashinfer, "find_toolkit", lambda environ, found=toolkit: found)
        build = build_of(look("flashinfer"))
        assert (build.flag("cubins"), build.flag("jit_cache")) == ("0.7.4", "unknown")
        assert build.flag("compiler") == flag


def test_triton_without_an_nvidia_back_end_is_broken_and_says_what_it_has(
    install_stub: InstallStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub("triton", "3.7.1")
    backends = ModuleType("triton.backends")
    backends.backends = {"amd": object()}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.backends", backends)
    entry = look("triton")
    assert entry.status is VendorStatus.BROKEN
    assert "compiles for amd, not for nvidia" in str(entry.error)


@pytest.mark.parametrize(
    ("name", "distribution", "module", "text", "words"),
    [
        (
            "flash_attn",
            "flash-attn",
            "flash_attn/flash_attn_interface.py",
            "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa')",
            "undefined symbol: _ZN3c104cuda",
        ),
        (
            "flash_attn",
            "flash-attn",
            "flash_attn/flash_attn_interface.py",
            "def flash_attn_varlen_func(q, k, v): ...",
            "has no flash_attn_with_kvcache: too old",
        ),
        (
            "flashinfer",
            "flashinfer-python",
            "flashinfer/__init__.py",
            "raise RuntimeError('No CUDA GPUs are available')",
            "RuntimeError: No CUDA GPUs are available",
        ),
        (
            "flash_mla",
            "sgl-flash-mla",
            "flash_mla/__init__.py",
            "raise OSError('libcudart.so.13: cannot open shared object file')",
            "OSError: libcudart.so.13",
        ),
    ],
)
def test_a_library_that_does_not_load_is_broken_in_its_own_words(
    install_stub: InstallStub,
    tmp_path: Path,
    name: str,
    distribution: str,
    module: str,
    text: str,
    words: str,
) -> None:
    install_stub(distribution, "1.0")
    path = tmp_path / module
    path.parent.mkdir()
    (path.parent / "__init__.py").touch()
    path.write_text(text)
    entry = look(name)
    assert entry.status is VendorStatus.BROKEN
    assert words in str(entry.error)


@pytest.mark.parametrize(
    "module",
    [
        *(fa3_fwd, flash_attn, flash_attn_3, flash_attn_4, flash_mla, flashinfer, triton),
        *(vllm_flash_attn_2, vllm_flash_attn_3),
    ],
)
def test_specs_point_at_their_probes(module: ModuleType) -> None:
    assert module.SPEC.probe == f"{module.__name__}:probe"
    assert module.SPEC in SPECS


_FEW = "class flash_attn_3_gpu:\n    def fwd(q, k, v): ...\n"
_ALL = (
    "class flash_attn_3_gpu:\n    def fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, "
    "page_table, sinks, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal, softcap, "
    "num_splits, window_size_left, window_size_right, scheduler_metadata, q_descale, k_descale, "
    "v_descale): ...\n"
)


@pytest.mark.parametrize(
    ("namespace", "has_operator"),
    [("", False), (_FEW, False), (_ALL, True)],
    ids=["none", "another", "known"],
)
def test_the_operator_of_flash_attention_3_counts_where_it_is_the_known_one(
    install_stub: InstallStub, tmp_path: Path, namespace: str, has_operator: bool
) -> None:
    install_stub("flash-attn-3", "3.0.0")
    functions = "def flash_attn_varlen_func(q): ...\ndef flash_attn_with_kvcache(q): ...\n"
    (tmp_path / "flash_attn_interface.py").write_text(functions + namespace)
    build = build_of(look("flash_attn_3"))
    assert ("fwd.out" in build.optional_arguments) is has_operator
    assert (flash_attn_3.operator() is not None) is has_operator


def test_an_operator_of_torch_is_read_by_its_schema(
    install_stub: InstallStub, tmp_path: Path
) -> None:
    install_stub("flash-attn-3", "3.0.0")
    functions = "def flash_attn_varlen_func(q): ...\ndef flash_attn_with_kvcache(q): ...\n"
    namespace = "import torch\nclass flash_attn_3_gpu:\n    fwd = torch.ops.aten.add\n"
    (tmp_path / "flash_attn_interface.py").write_text(functions + namespace)
    assert "fwd.out" not in build_of(look("flash_attn_3")).optional_arguments
