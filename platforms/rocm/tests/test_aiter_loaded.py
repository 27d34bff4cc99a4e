"""AITER that does not load, GPUs that differ in their fp8, and layers made before either."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from aiter_testing import HEAD, MI300X, MI355X, WHEEL, inventory, layer_spec, request, stubbed

from attn_rocm import _aiter_loaded
from attn_rocm._vendor import aiter
from attn_rocm.backends.rocm_aiter_fa import AiterFlashBackend, AiterFlashImpl
from attn_rocm.backends.rocm_aiter_unified_attn import AiterUnifiedBackend, AiterUnifiedImpl
from attn_rocm.platform import RocmPlatform
from attn_shared.errors import InvalidInputError, UnsupportedOptionError, VendorMissingError
from attn_shared.inventory import Inventory, probe, scan
from attn_shared.selection import Policy
from attn_shared.selector import select

InstallStub = Callable[..., None]
SPECS = RocmPlatform().vendor_specs()

# What its import raises: missing, made for another torch, and on a GPU that it does not know.
FAILURES = {
    "another torch": (
        "raise ImportError('module_aiter_core.so: undefined symbol: _ZN3c104impl')",
        "undefined symbol: _ZN3c104impl",
    ),
    "another architecture": (
        "raise RuntimeError('Get GPU arch from rocminfo failed: gfx1030 is not supported')",
        "gfx1030 is not supported",
    ),
    "an unknown architecture": ("raise KeyError('gfx1030')", "KeyError: 'gfx1030'"),
    "no rocminfo": ("raise FileNotFoundError('rocminfo')", "FileNotFoundError: rocminfo"),
}


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    _aiter_loaded.forget()
    yield
    _aiter_loaded.forget()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("backend", [AiterFlashBackend, AiterUnifiedBackend])
def test_an_import_that_fails_is_told_in_its_own_words(
    install_stub: InstallStub,
    tmp_path: Path,
    backend: type[AiterFlashBackend | AiterUnifiedBackend],
    failure: str,
) -> None:
    code, words = FAILURES[failure]
    install_stub("amd-aiter", "0.1.7.post2.dev18")
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter/__init__.py").write_text(code)
    found = probe(SPECS, ["aiter"], scan(SPECS))

    with pytest.raises(VendorMissingError) as error:
        select(request(), MI300X, found, Policy(backend=backend.name))
    assert words in str(error.value)
    with pytest.raises(VendorMissingError) as error:
        backend.load_vendor(MI300X, found)
    assert words in str(error.value)
    assert select(request(), MI300X, found).backend_cls.name != backend.name


@pytest.mark.parametrize("backend", [AiterFlashBackend, AiterUnifiedBackend])
def test_without_aiter_the_named_backend_gives_the_command(
    install_stub: InstallStub, backend: type[AiterFlashBackend]
) -> None:
    found = scan(SPECS)
    with pytest.raises(VendorMissingError) as error:
        select(request(), MI300X, found, Policy(backend=backend.name))
    assert 'pip install "attn-rocm[aiter]"' in str(error.value)


@pytest.mark.parametrize("impl", [AiterFlashImpl, AiterUnifiedImpl])
def test_a_layer_made_before_the_library_is_loaded_says_what_to_do(impl: type) -> None:
    with pytest.raises(VendorMissingError, match=r"load_vendor\(device, inventory\)"):
        impl(layer_spec())


@pytest.mark.parametrize("name", ["mha_batch_prefill_func", "paged_attention_v1"])
def test_a_call_that_vanished_is_named(name: str) -> None:
    with stubbed(WHEEL):
        delattr(sys.modules["aiter"], name)
        with pytest.raises(ImportError, match=name):
            AiterFlashImpl(layer_spec())


@pytest.mark.parametrize("release", [WHEEL, HEAD])
def test_the_triton_call_is_found_where_each_release_keeps_it(release: str) -> None:
    with stubbed(release):
        assert aiter.call("unified_attention").__name__ == "unified_attention"


def fp8(dtype: torch.dtype) -> dict[str, object]:
    return {"cache": {"dtype": dtype, "kv_cache_dtype": "fp8"}}


@pytest.mark.parametrize("impl", [AiterFlashImpl, AiterUnifiedImpl])
@pytest.mark.parametrize(
    ("device", "wrong"), [(MI300X, torch.float8_e4m3fn), (MI355X, torch.float8_e4m3fnuz)]
)
def test_the_other_flavour_of_fp8_is_refused_with_the_remedy(
    impl: type, device: object, wrong: torch.dtype
) -> None:
    backend = AiterFlashBackend if impl is AiterFlashImpl else AiterUnifiedBackend
    with stubbed(WHEEL, backend, device):  # type: ignore[arg-type]
        with pytest.raises(UnsupportedOptionError) as error:
            impl(layer_spec(**fp8(wrong)))
        assert f"a cache of {wrong} is not served" in str(error.value)
        assert f"allowed: {device.fp8_dtype}" in str(error.value)  # type: ignore[attr-defined]
        assert "fp8_e4m3_dtype=device.fp8_dtype" in str(error.value)
        impl(layer_spec(**fp8(device.fp8_dtype)))  # type: ignore[attr-defined]
        impl(layer_spec())


def test_gpus_of_both_flavours_share_no_fp8_cache() -> None:
    with stubbed(WHEEL):
        _aiter_loaded.load(MI355X, inventory(None))
        with pytest.raises(InvalidInputError) as error:
            AiterFlashImpl(layer_spec(**fp8(torch.float8_e4m3fn)))
        assert "gfx942" in str(error.value)
        assert "gfx950" in str(error.value)
        AiterFlashImpl(layer_spec())


def test_the_latest_word_on_an_architecture_counts() -> None:
    with stubbed(WHEEL):
        first = _aiter_loaded.loaded("X")
        _aiter_loaded.load(MI300X, Inventory())
        assert first.device == _aiter_loaded.loaded("X").device
        assert _aiter_loaded.loaded("X").inventory == Inventory()
