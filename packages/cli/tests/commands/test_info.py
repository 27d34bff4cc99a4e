from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.registry import DEFAULT_REGISTRY


def platform_record(record: Any, name: str) -> Any:
    return next(p for p in record["platforms"] if p["name"] == name)


def test_each_platform_says_whether_it_is_here_and_why(attn: Any) -> None:
    record = attn.json("info")
    assert record["schema_version"] == 1
    platforms = DEFAULT_REGISTRY.platforms()
    assert [p["name"] for p in record["platforms"]] == list(platforms)
    for found in record["platforms"]:
        availability = platforms[found["name"]].availability()
        assert (found["available"], found["reason"]) == (
            availability.is_available,
            availability.reason,
        )
        assert found["reason"]
        assert bool(found["devices"]) == found["available"]


def test_each_platform_says_what_lies_beneath(attn: Any) -> None:
    platforms = DEFAULT_REGISTRY.platforms()
    for found in attn.json("info")["platforms"]:
        assert found["versions"] == platforms[found["name"]].versions()


def test_the_cpu_is_always_there(attn: Any) -> None:
    cpu = platform_record(attn.json("info"), "cpu")
    assert cpu["available"]
    (device,) = cpu["devices"]
    assert device["vendor"] == "cpu"
    assert device["memory_bytes"] > 0


def test_versions_and_the_build_of_torch(attn: Any) -> None:
    record = attn.json("info")
    assert record["torch"]["version"] == torch.__version__
    assert record["torch"]["cuda"] == torch.version.cuda
    assert record["versions"]["attn-shared"] == importlib.metadata.version("attn-shared")


def test_vendor_libraries_are_looked_up_with_their_commands(attn: Any) -> None:
    libraries = platform_record(attn.json("info"), "cuda")["vendor_libraries"]
    assert {"flash_attn", "flashinfer"} <= {entry["name"] for entry in libraries}
    for entry in libraries:
        assert entry["status"] in ("absent", "present")
        assert entry["install"]


def test_the_table_holds_the_same(attn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_CACHE_DIR", "/some/folder")
    monkeypatch.setenv("ATTN_BAKEND", "x")
    result = attn("info")
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert f"torch {torch.__version__}" in text
    assert re.search(r"cpu attn-cpu available", text)
    assert "ATTN_CACHE_DIR: /some/folder" in text
    assert "ATTN_BAKEND is set and unknown" in text


def test_quiet_prints_the_current_platform(attn: Any) -> None:
    record = attn.json("info")
    assert attn("info", "-q").stdout == f"{record['current_platform']}\n"


class TestProbe:
    """A library "json" that is always there, and one whose probe fails."""

    @pytest.fixture
    def with_libraries(self, monkeypatch: pytest.MonkeyPatch) -> list[VendorSpec]:
        specs: list[VendorSpec] = []
        cpu = type(DEFAULT_REGISTRY.platforms()["cpu"])
        monkeypatch.setattr(cpu, "vendor_specs", lambda _self: tuple(specs))
        monkeypatch.setattr(json, "probe_well", lambda: BUILD, raising=False)
        monkeypatch.setattr(json, "probe_badly", _fail, raising=False)
        return specs

    def test_a_library_that_loads(self, attn: Any, with_libraries: list[VendorSpec]) -> None:
        with_libraries.append(spec("well", "json:probe_well"))
        before = platform_record(attn.json("info"), "cpu")["vendor_libraries"]
        assert [entry["status"] for entry in before] == ["present"]
        (entry,) = platform_record(attn.json("info", "--probe"), "cpu")["vendor_libraries"]
        assert (entry["status"], entry["version"]) == ("loaded", "3.1")
        assert entry["flags"] == {"paged": "on"}
        assert "paged=on" in attn("info", "--probe").stdout

    def test_a_library_that_does_not(self, attn: Any, with_libraries: list[VendorSpec]) -> None:
        with_libraries.append(spec("badly", "json:probe_badly"))
        assert attn("info").exit_code == 0
        record = attn.json("info", "--probe", code=1)
        (entry,) = platform_record(record, "cpu")["vendor_libraries"]
        assert entry["status"] == "broken"
        assert "libfoo.so.1: undefined symbol" in entry["error"]
        result = attn("info", "--probe")
        assert result.exit_code == 1
        assert "undefined symbol" in " ".join(result.stdout.split())


BUILD = VendorBuild(version="3.1", flags=(("paged", "on"),))


def _fail() -> VendorBuild:
    raise OSError("libfoo.so.1: undefined symbol")


def spec(name: str, probe: str) -> VendorSpec:
    return VendorSpec(
        name=name, distributions=(), module="json", install=f"pip install {name}", probe=probe
    )


def test_output_goes_to_a_file_too(attn: Any, tmp_path: Path) -> None:
    path = tmp_path / "info.json"
    attn("info", "--output", str(path))
    assert json.loads(path.read_text()) == attn.json("info")
