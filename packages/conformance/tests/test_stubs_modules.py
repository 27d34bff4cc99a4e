"""Stubs in the place of modules: found as what is installed is, and gone afterwards."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from types import ModuleType

import pytest

from attn_conformance.stubs.modules import VendorStub, stub_module, stub_vendor
from attn_conformance.stubs.opaque import OpaqueFunction
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.vendors.flash_attn_2 import FLASH_ATTN_2
from attn_conformance.stubs.vendors.flash_attn_4 import FLASH_ATTN_4
from attn_shared.inventory import VendorSpec, VendorStatus, scan
from attn_shared.probing import optional_arguments

DOUBLE = OpaqueFunction(
    signature=VendorSignature(name="double", parameters="x, times=2", returns="x times 2"),
    answer=lambda arguments: arguments["x"] * arguments["times"],
)
SPEC = VendorSpec(
    name="flash_attn",
    distributions=("flash-attn",),
    module="flash_attn",
    install="pip install flash-attn",
    probe="nowhere:probe",
)


def test_a_module_is_importable_inside_and_recorded() -> None:
    with stub_module("vendor.deep.ops", {"double": DOUBLE, "LIMIT": 7}) as recorder:
        ops = importlib.import_module("vendor.deep.ops")
        assert ops.double(4) == 8
        assert ops.LIMIT == 7
        assert importlib.import_module("vendor").deep.ops is ops
    assert [call.arguments["x"] for call in recorder.calls] == [4]


def test_it_is_gone_outside() -> None:
    path = list(sys.path)
    with stub_module("vendor.ops", {"double": DOUBLE}):
        pass

    assert "vendor" not in sys.modules
    assert "vendor.ops" not in sys.modules
    assert sys.path == path
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vendor.ops")


def test_what_was_imported_before_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real, sub = ModuleType("vendor"), ModuleType("vendor.real_part")
    monkeypatch.setitem(sys.modules, "vendor", real)
    monkeypatch.setitem(sys.modules, "vendor.real_part", sub)

    with stub_module("vendor.ops", {}):
        assert sys.modules["vendor"] is not real
        assert "vendor.real_part" not in sys.modules
    assert sys.modules["vendor"] is real
    assert sys.modules["vendor.real_part"] is sub


def test_it_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), stub_module("vendor", {}):
        raise KeyError

    assert "vendor" not in sys.modules


def test_its_distribution_has_a_version() -> None:
    with stub_module("vendor", {}, distribution="vendor-kernels", version="3.1"):
        assert importlib.metadata.version("vendor-kernels") == "3.1"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vendor-kernels")


def test_an_inventory_finds_it_without_importing() -> None:
    with stub_vendor(FLASH_ATTN_2):
        entry = scan([SPEC]).get("flash_attn")

    assert entry.status is VendorStatus.PRESENT
    assert entry.version == "2.8.3"


def test_a_probe_sees_its_arguments() -> None:
    with stub_vendor(FLASH_ATTN_2):
        module = importlib.import_module("flash_attn")
        calls = {"varlen": module.flash_attn_varlen_func}
        found = optional_arguments(calls, ["block_table", "seqused_k"])

    assert found == {"varlen.block_table"}


def test_a_package_without_a_module_of_its_own_is_made() -> None:
    with stub_vendor(FLASH_ATTN_4):
        assert importlib.util.find_spec("flash_attn.cute") is not None
        assert not hasattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func")


def test_two_releases_share_a_package() -> None:
    with stub_vendor(FLASH_ATTN_2, FLASH_ATTN_4):
        package = importlib.import_module("flash_attn")
        assert package.flash_attn_varlen_func is not package.cute.flash_attn_varlen_func
        assert importlib.metadata.version("flash-attn") == "2.8.3"
        assert importlib.metadata.version("flash-attn-4") == "4.0.0b36"


def test_a_stub_is_data() -> None:
    stub = VendorStub(distribution="vendor", version="1", modules={"vendor": {"X": 1}})

    with stub_vendor(stub):
        assert importlib.import_module("vendor").X == 1
