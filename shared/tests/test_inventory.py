from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
from attn_shared_fakes import GPU, library, request

from attn_shared.errors import UnknownNameError
from attn_shared.inventory import (
    Inventory,
    VendorBuild,
    VendorEntry,
    VendorSpec,
    VendorStatus,
    assume_all,
    probe,
    scan,
)

PRESENT, LOADED, BROKEN = VendorStatus.PRESENT, VendorStatus.LOADED, VendorStatus.BROKEN
BUILD = VendorBuild(version="2.8.3", flags=(("cuda", "12.8"),), kernel_lse_base="e")

WriteModule = Callable[[str, str], None]


def spec(name: str = "flash_attn", **options: object) -> VendorSpec:
    plain: dict[str, object] = {
        "name": name,
        "distributions": ("no-such-distribution",),
        "module": "no_such_module",
        "install": f"pip install {name}",
        "probe": "no_such_module:probe",
    }
    return VendorSpec(**{**plain, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entry", "is_usable", "text"),
    [
        (
            library("flash_attn", VendorStatus.ABSENT),
            False,
            "flash_attn is not installed; to install it: pip install flash_attn",
        ),
        (
            VendorEntry(name="flash_attn", status=VendorStatus.ABSENT),
            False,
            "flash_attn is a library that no installed platform package declares",
        ),
        (
            library("flash_attn", BROKEN, version="2.8.3", error="OSError: libcudart"),
            False,
            (
                "flash_attn 2.8.3 failed to load: OSError: libcudart; to install it again: "
                "pip install flash_attn"
            ),
        ),
        (
            VendorEntry(name="flash_attn", status=BROKEN, error="OSError: libcudart"),
            False,
            "flash_attn failed to load: OSError: libcudart",
        ),
        (library("flash_attn", PRESENT, version="2.8.3"), True, "flash_attn 2.8.3 (present)"),
        (library("flash_attn", PRESENT), True, "flash_attn (present)"),
        (library("flash_attn", LOADED, version="2.8.3"), True, "flash_attn 2.8.3 (loaded)"),
        (library("flash_attn", VendorStatus.ASSUMED), True, "flash_attn (assumed)"),
    ],
)
def test_an_entry_says_what_is_known_and_what_would_mend_it(
    entry: VendorEntry, is_usable: bool, text: str
) -> None:
    assert entry.is_usable is is_usable
    assert entry.describe() == text


def test_build_flags_by_name() -> None:
    assert BUILD.flag("cuda") == "12.8"
    assert BUILD.flag("hip") is None


def test_an_entry_is_json_safe() -> None:
    build = VendorBuild(version="1", optional_arguments=frozenset({"s_aux", "num_splits"}))
    record = json.loads(json.dumps(library("fa", LOADED, version="1", build=build).to_dict()))
    assert record["status"] == "loaded"
    assert record["optional_arguments"] == ["num_splits", "s_aux"]
    record = json.loads(json.dumps(library("fa", LOADED, build=BUILD).to_dict()))
    assert record["flags"] == {"cuda": "12.8"}
    assert record["kernel_lse_base"] == "e"
    assert library("fa").to_dict()["flags"] == {}


def test_a_library_that_nobody_looked_for_is_absent() -> None:
    entry = Inventory().get("flash_attn")
    assert (entry.name, entry.status, entry.install) == ("flash_attn", VendorStatus.ABSENT, "")


def test_an_entry_replaces_what_was_known() -> None:
    first = Inventory((library("a"), library("b")))
    second = first.with_entry(library("a", LOADED, build=BUILD))
    assert first.get("a").status is PRESENT
    assert second.get("a").build == BUILD
    assert second.get("b") == first.get("b")
    assert len(second.entries) == 2
    assert first != second


def test_a_broken_library_keeps_its_version_and_its_own_words() -> None:
    known = Inventory((library("a", LOADED, version="3.1", distribution="dist-a", build=BUILD),))
    entry = known.with_broken("a", OSError("libfoo.so: undefined symbol")).get("a")
    assert entry == library(
        "a",
        BROKEN,
        version="3.1",
        distribution="dist-a",
        error="OSError: libfoo.so: undefined symbol",
    )
    assert known.with_broken("a", "in words").get("a").error == "in words"


def test_equal_inventories_are_one_key() -> None:
    first, second = Inventory((library("a"),)), Inventory((library("a"),))
    assert first == second
    assert hash(first) == hash(second)


def test_what_keys_a_selection_crosses_processes() -> None:
    # String hashes differ between processes: a hash that travelled would miss in the dict below.
    records = (request(window=(3, 0)), GPU, Inventory((library("a", LOADED, build=BUILD),)))
    hash(records)
    code = (
        "import pickle, sys; first, second = pickle.load(sys.stdin.buffer); "
        "print({first: 'found'}[second], hash(first) == hash(second))"
    )
    sent = pickle.dumps((records, pickle.loads(pickle.dumps(records))))
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.split() == [b"found", b"True"]


def test_scan_finds_a_distribution_without_importing_it() -> None:
    found = scan([spec(distributions=("no-such-distribution", "pytest"), module="pytest")])
    entry = found.get("flash_attn")
    assert entry.status is PRESENT
    assert entry.distribution == "pytest"
    assert entry.version == pytest.__version__


def test_scan_finds_a_module_without_metadata_and_imports_nothing(
    write_module: WriteModule,
) -> None:
    write_module("attn_fake_vendor", "raise RuntimeError('imported')")
    entry = scan([spec(module="attn_fake_vendor")]).get("flash_attn")
    assert (entry.status, entry.version) == (PRESENT, None)
    assert "attn_fake_vendor" not in sys.modules


@pytest.mark.parametrize("module", ["no_such_module", "json.decoder", "attn_fake_none"])
def test_scan_takes_no_sub_module_and_no_nonsense_for_a_sign(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "attn_fake_none", None)
    assert scan([spec(module=module)]).get("flash_attn").status is VendorStatus.ABSENT


def test_probe_loads_what_is_present(write_module: WriteModule) -> None:
    write_module(
        "attn_fake_vendor",
        "from attn_shared.inventory import VendorBuild\n"
        "def probe():\n    return VendorBuild(version='9.9', kernel_lse_base='2')\n",
    )
    specs = [spec("a", probe="attn_fake_vendor:probe"), spec("b")]
    known = probe(specs, ["a"], Inventory((library("a", distribution="dist-a"), library("b"))))
    build = VendorBuild(version="9.9", kernel_lse_base="2")
    assert known.get("a") == library("a", LOADED, distribution="dist-a", version="9.9", build=build)
    assert known.get("b").status is PRESENT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "raise ImportError('undefined symbol: _ZN3c10')",
            "ImportError: undefined symbol: _ZN3c10",
        ),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        (
            "raise RuntimeError('No CUDA GPUs are available')",
            "RuntimeError: No CUDA GPUs are avail",
        ),
        ("raise AttributeError('half a wheel')", "AttributeError: half a wheel"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Panic(BaseException): pass\nraise Panic('rust')", "Panic: rust"),
        ("raise ImportError", "ImportError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("nothing = 1", "AttributeError: module 'attn_fake_vendor' has no attribute 'probe'"),
        ("def probe(): 1 / 0", "ZeroDivisionError: division by zero"),
        ("def probe(): return 'x'", "TypeError: attn_fake_vendor:probe returned 'x' instead of"),
    ],
)
def test_whatever_a_probe_raises_means_broken_in_its_own_words(
    text: str, words: str, write_module: WriteModule
) -> None:
    write_module("attn_fake_vendor", text)
    known = Inventory((library("a"),))
    entry = probe([spec("a", probe="attn_fake_vendor:probe")], ["a"], known).get("a")
    assert entry.status is BROKEN
    assert entry.error is not None
    assert entry.error.startswith(words)


def test_an_interrupt_is_no_fault_of_the_library(write_module: WriteModule) -> None:
    write_module("attn_fake_vendor", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        probe([spec("a", probe="attn_fake_vendor:probe")], ["a"], Inventory((library("a"),)))


@pytest.mark.parametrize("status", [VendorStatus.ABSENT, LOADED, BROKEN, VendorStatus.ASSUMED])
def test_probe_leaves_what_is_not_just_present(status: VendorStatus) -> None:
    known = Inventory((library("a", status),))
    assert probe([spec("a")], ["a"], known) is known


def test_probe_refuses_a_library_that_nobody_declares() -> None:
    with pytest.raises(
        UnknownNameError, match="unknown vendor library 'flash'; allowed: flash_att"
    ):
        probe([spec()], ["flash"], Inventory())


def test_assume_all_takes_everything_as_installed() -> None:
    assumed = assume_all([spec("a"), spec("b")])
    assert [(e.name, e.status, e.build) for e in assumed.entries] == [
        ("a", VendorStatus.ASSUMED, None),
        ("b", VendorStatus.ASSUMED, None),
    ]


def test_libraries_that_are_left_aside() -> None:
    known = Inventory((VendorEntry(name="a", status=VendorStatus.LOADED, version="2.0"),))
    left = known.without(("a",))
    assert known.without(()) is known
    assert not left.get("a").is_usable
    assert left.get("a").describe() == "a 2.0 is left aside: the policy avoids it"
    with pytest.raises(UnknownNameError, match="vendor library"):
        known.without(("b",))
