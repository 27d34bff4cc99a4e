"""FlashAttention inside an installed vLLM, found and loaded without vLLM itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from attn_conformance.stubs.modules import stub_vendor
from attn_conformance.stubs.vendors.vllm_flash_attn import (
    VLLM_FLASH_ATTN,
    VLLM_FLASH_ATTN_2,
    VLLM_FLASH_ATTN_3_FUNCTION,
)
from attn_cuda._vendor import vllm_flash_attn
from attn_cuda.platform import CudaPlatform
from attn_shared.inventory import VendorEntry, VendorStatus, probe, scan
from attn_shared.probing import argument_names

InstallStub = Callable[..., None]
SPECS = CudaPlatform().vendor_specs()

INTERFACE = """
FA2_AVAILABLE, FA3_AVAILABLE = False, True
FA2_UNAVAILABLE_REASON = "libcudart.so.12: cannot open shared object file"
def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, out=None,
                           scheduler_metadata=None, fa_version=2): ...
"""


@pytest.fixture(autouse=True)
def alias_forgotten() -> Iterator[None]:
    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith(vllm_flash_attn._ALIAS)]:
            del sys.modules[name]

    forget()
    yield
    forget()


def look(version: int) -> VendorEntry:
    name = f"vllm_flash_attn_{version}"
    return probe(SPECS, [name], scan(SPECS)).get(name)


def write_wheel(folder: Path, text: str = INTERFACE) -> None:
    package = folder / "vllm" / "vllm_flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('loads all of vLLM')")
    (package / "flash_attn_interface.py").write_text(text)
    (folder / "vllm" / "__init__.py").write_text("raise ImportError('configures torch')")


def test_it_is_loaded_from_its_folder_and_vllm_is_not(
    install_stub: InstallStub, tmp_path: Path
) -> None:
    install_stub("vllm", "0.25.1")
    write_wheel(tmp_path)
    entry = look(3)
    assert entry.status is VendorStatus.LOADED, entry.error
    assert (entry.version, entry.distribution) == ("0.25.1", "vllm")
    assert entry.build is not None
    assert "flash_attn_varlen_func.out" in entry.build.optional_arguments
    assert "vllm" not in sys.modules


def test_an_extension_that_does_not_load_says_why(
    install_stub: InstallStub, tmp_path: Path
) -> None:
    install_stub("vllm", "0.25.1")
    write_wheel(tmp_path)
    entry = look(2)
    assert entry.status is VendorStatus.BROKEN
    assert "FlashAttention 2 does not load: libcudart.so.12" in str(entry.error)


def test_a_vllm_of_another_platform_has_none(install_stub: InstallStub, tmp_path: Path) -> None:
    install_stub("vllm", "0.25.1")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    entry = look(3)
    assert entry.status is VendorStatus.BROKEN
    assert "has no vllm_flash_attn: it was built for another platform" in str(entry.error)


def test_metadata_without_the_package(install_stub: InstallStub) -> None:
    install_stub("vllm", "0.25.1")
    assert "not on the path" in str(look(2).error)


def test_an_interface_without_its_flags_is_another_vllm(
    install_stub: InstallStub, tmp_path: Path
) -> None:
    install_stub("vllm", "0.9.0")
    write_wheel(tmp_path, "def flash_attn_varlen_func(q, k, v): ...")
    assert "has no FA3_AVAILABLE: another vLLM" in str(look(3).error)


def test_a_vllm_that_is_loaded_brings_its_own_copy() -> None:
    with stub_vendor(VLLM_FLASH_ATTN):
        assert vllm_flash_attn.interface() is sys.modules[vllm_flash_attn._MODULE]
        for version in (2, 3):
            assert look(version).status is VendorStatus.LOADED
    with stub_vendor(VLLM_FLASH_ATTN_2):
        assert look(2).status is VendorStatus.LOADED
        assert "cannot import name '_vllm_fa3_C'" in str(look(3).error)


def test_the_operator_counts_where_it_takes_what_is_known(
    install_stub: InstallStub, tmp_path: Path
) -> None:
    with stub_vendor(VLLM_FLASH_ATTN):
        operator = vllm_flash_attn.operator_3()
        assert operator is not None
        assert argument_names(operator) == vllm_flash_attn._OPERATOR_3
    for stub in (VLLM_FLASH_ATTN_2, VLLM_FLASH_ATTN_3_FUNCTION):
        with stub_vendor(stub):
            assert vllm_flash_attn.operator_3() is None
    install_stub("vllm", "0.30.0")
    another = "class _vllm_fa3_C:\n    def fwd(q, k, v, out, cu_seqlens_q): ...\n"
    write_wheel(tmp_path, INTERFACE + another)
    assert vllm_flash_attn.operator_3() is None


def test_the_operator_is_read_by_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    # What `strings` shows of vLLM 0.25.1's extension, defined here without a kernel.
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(SCHEMA)
    with stub_vendor(VLLM_FLASH_ATTN_3_FUNCTION):
        monkeypatch.setattr(vllm_flash_attn.interface(), "_vllm_fa3_C", object(), raising=False)
        assert vllm_flash_attn.operator_3() is torch.ops._vllm_fa3_C.fwd.default
    library._destroy()


SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
