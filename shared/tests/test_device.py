from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch

from attn_shared.device import (
    DeviceCapability,
    DeviceFacts,
    Fp8Format,
    Vendor,
    device_from_arch,
    preset,
    resolve_device,
)
from attn_shared.errors import InvalidInputError, UnknownNameError

H200 = DeviceFacts(
    vendor=Vendor.NVIDIA,
    name="NVIDIA H200",
    arch="sm_90",
    capability=DeviceCapability(vendor=Vendor.NVIDIA, major=9, minor=0),
    arch_family="hopper",
    fp8=Fp8Format.E4M3FN,
    memory_bytes=150_000_000_000,
    compute_units=132,
    shared_memory_bytes=232_448,
    memory_bandwidth_bytes_per_s=4_800_000_000_000,
    index=3,
    uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    notes=("first",),
)
CPU = DeviceFacts(
    vendor=Vendor.CPU,
    name="some CPU",
    arch="x86_64",
    capability=None,
    arch_family="x86",
    fp8=Fp8Format.NONE,
    isa=("avx2", "avx512f", "amx_bf16"),
)


@pytest.mark.parametrize(
    ("fp8", "dtype"),
    [
        (Fp8Format.NONE, None),
        (Fp8Format.E4M3FN, torch.float8_e4m3fn),
        (Fp8Format.E4M3FNUZ, torch.float8_e4m3fnuz),
    ],
)
def test_fp8_dtype(fp8: Fp8Format, dtype: torch.dtype | None) -> None:
    assert dataclasses.replace(H200, fp8=fp8).fp8_dtype is dtype


@pytest.mark.parametrize(
    ("arch", "device_type"),
    [("sm_90", "cuda"), ("gfx942", "cuda"), ("bmg", "xpu"), ("x86_64", "cpu")],
)
def test_torch_device_type(arch: str, device_type: str) -> None:
    assert device_from_arch(arch).torch_device_type == device_type


def test_is_arch_is_exact() -> None:
    assert H200.is_arch("sm_90")
    assert H200.is_arch("gfx942", "sm_90a")  # a kernel for sm_90a is for this device
    assert not H200.is_arch("sm_100", "gfx90a")
    assert not H200.is_arch()
    assert not device_from_arch("gfx1100").is_arch("gfx110f")
    assert not device_from_arch("gfx11-generic").is_arch("gfx1100")


def test_is_arch_refuses_a_misspelt_name() -> None:
    with pytest.raises(UnknownNameError, match="hopper"):
        H200.is_arch("hopper")


def test_has_isa_is_exact() -> None:
    assert CPU.has_isa("avx512f")
    assert not CPU.has_isa("avx512")
    assert not H200.has_isa("avx2")


@pytest.mark.parametrize("facts", [H200, CPU, preset("mi300x"), preset("b60"), preset("spr")])
def test_json_and_back(facts: DeviceFacts) -> None:
    assert DeviceFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


def test_dict_is_plain() -> None:
    record = H200.to_dict()
    assert record["vendor"] == "nvidia"
    assert record["capability"] == [9, 0]
    assert record["notes"] == ["first"]
    assert {type(value) for value in record.values()} <= {str, int, bool, list, type(None)}
    assert CPU.to_dict()["capability"] is None


def without(field: str) -> dict[str, Any]:
    return {key: value for key, value in H200.to_dict().items() if key != field}


def test_from_dict_fills_in_defaults() -> None:
    assert DeviceFacts.from_dict(without("uuid")).uuid is None
    assert DeviceFacts.from_dict(without("isa")).isa == ()


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        (without("arch"), InvalidInputError, "arch is missing"),
        ({**H200.to_dict(), "memory": 1}, UnknownNameError, "memory_bytes"),
        ({**H200.to_dict(), "vendor": "nvidea"}, UnknownNameError, "did you mean 'nvidia'"),
        ({**H200.to_dict(), "fp8": "fnuz"}, UnknownNameError, "e4m3fnuz"),
        ({**H200.to_dict(), "capability": "9.0"}, InvalidInputError, r"\[major, minor\]"),
        ({**H200.to_dict(), "capability": None}, InvalidInputError, "vendor nvidia"),
        ({**H200.to_dict(), "memory_bytes": "80GB"}, InvalidInputError, "80GB"),
        ({**H200.to_dict(), "isa": "avx2"}, InvalidInputError, "isa is 'avx2'"),
    ],
)
def test_from_dict_names_what_is_wrong(
    record: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DeviceFacts.from_dict(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"compute_units": -1}, "compute_units is -1"),
        ({"index": -1}, "index is -1"),
        ({"isa": ["avx2"]}, "tuple"),
        ({"vendor": Vendor.AMD}, "vendor amd"),
        ({"vendor": Vendor.INTEL}, "capability is .*vendor intel; allowed: None"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        dataclasses.replace(H200, **change)


def test_equal_facts_hash_alike_and_others_differ() -> None:
    twin = DeviceFacts.from_dict(H200.to_dict())
    assert twin is not H200
    assert hash(twin) == hash(H200)
    assert {H200: "found"}[twin] == "found"
    assert len({H200, dataclasses.replace(H200, index=0), CPU}) == 3


def test_hash_survives_copies() -> None:
    hash(H200)  # fills the cache, which must not travel
    for twin in (copy.copy(H200), copy.deepcopy(H200), pickle.loads(pickle.dumps(H200))):
        assert twin == H200
        assert hash(twin) == hash(H200)


def test_a_cached_hash_is_not_pickled() -> None:
    # In another process strings hash otherwise, so a hash that came along would be wrong there.
    foreign = DeviceFacts.from_dict(H200.to_dict())
    object.__setattr__(foreign, "_hash", hash(H200) + 1)
    assert hash(foreign) != hash(H200)
    assert hash(pickle.loads(pickle.dumps(foreign))) == hash(H200)


def test_facts_are_frozen_and_slotted() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        H200.index = 0  # type: ignore[misc]
    assert not hasattr(H200, "__dict__")


def test_device_from_arch_knows_what_the_name_says_and_no_more() -> None:
    facts = device_from_arch("gfx942:sramecc+:xnack-")
    assert (facts.vendor, facts.arch, facts.arch_family) == (Vendor.AMD, "gfx942", "cdna3")
    assert facts.fp8 is Fp8Format.E4M3FNUZ
    assert facts.shared_memory_bytes == 65_536
    assert facts.is_simulated
    assert (facts.memory_bytes, facts.compute_units, facts.isa) == (None, None, ())


def test_device_from_an_unknown_arch_says_so() -> None:
    facts = device_from_arch("gfx1999")
    assert facts.arch_family == "unknown"
    assert any("unknown" in note for note in facts.notes)
    assert not any("unknown" in note for note in device_from_arch("gfx1100").notes)


@pytest.mark.parametrize(
    ("text", "name", "arch"),
    [
        ("H200", "NVIDIA H200", "sm_90"),
        ("rtx-5090", "NVIDIA GeForce RTX 5090", "sm_120"),
        ("9.0a", "any sm_90", "sm_90"),
        ("xe2", "any xe2", "xe2"),
    ],
)
def test_resolve_device(text: str, name: str, arch: str) -> None:
    facts = resolve_device(text)
    assert (facts.name, facts.arch) == (name, arch)


def test_resolve_device_lists_presets_and_forms() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'mi300x'") as caught:
        resolve_device("mi300")
    assert "rtx4090" in str(caught.value)
    assert "gfx942:sramecc+:xnack-" in str(caught.value)
