"""Facts of the visible AMD GPUs, and what the runtime's variables hide."""

from __future__ import annotations

import dataclasses
import json

import pytest

from attn_rocm.devices import facts_of, find_visible, torch_devices
from attn_rocm.kfd import KfdGpu, KfdReading
from attn_shared.device import Fp8Format

MI300X = KfdGpu(
    node=1,
    arch="gfx942",
    name="AMD Instinct MI300X OAM",
    pci_id="1002:74a1",
    uuid="GPU-a0b0c0d0e0f00102",
    memory_bytes=192 * 2**30,
    compute_units=304,
    lds_bytes=65536,
    wavefront=64,
    is_apu=False,
)
RX7900XTX = dataclasses.replace(
    MI300X,
    node=2,
    arch="gfx1100",
    name="",
    pci_id="1002:744c",
    uuid="GPU-55aa55aa55aa55aa",
    memory_bytes=24 * 2**30,
    compute_units=96,
)
MIXED = KfdReading(is_present=True, gpus=(MI300X, RX7900XTX))


def archs(environ: dict[str, str]) -> list[str]:
    return [device.arch for device in find_visible(MIXED, environ).devices]


@pytest.mark.parametrize(
    ("arch", "family", "fp8"),
    [
        ("gfx90a", "cdna2", Fp8Format.NONE),
        ("gfx942", "cdna3", Fp8Format.E4M3FNUZ),
        ("gfx950", "cdna4", Fp8Format.E4M3FN),
        ("gfx1100", "rdna3", Fp8Format.NONE),
        ("gfx1201", "rdna4", Fp8Format.E4M3FN),
    ],
)
def test_family_and_fp8_flavour_are_each_devices_own(
    arch: str, family: str, fp8: Fp8Format
) -> None:
    facts = facts_of(dataclasses.replace(MI300X, arch=arch), index=0)
    assert (facts.arch, facts.arch_family, facts.fp8) == (arch, family, fp8)
    json.dumps(facts.to_dict())


def test_facts_of_an_mi300x() -> None:
    facts = facts_of(MI300X, index=3, notes=("from a test",))
    assert (facts.name, facts.index, facts.uuid) == (
        "AMD Instinct MI300X OAM",
        3,
        "GPU-a0b0c0d0e0f00102",
    )
    assert (facts.memory_bytes, facts.compute_units) == (192 * 2**30, 304)
    assert facts.shared_memory_bytes == 65536
    assert facts.notes == ("from a test",)


def test_a_board_without_a_name_is_named_by_its_pci_id() -> None:
    assert facts_of(RX7900XTX, index=0).name == "AMD GPU 1002:744c"


def test_an_unknown_architecture_is_described_and_not_guessed() -> None:
    facts = facts_of(dataclasses.replace(MI300X, arch="gfx1999", lds_bytes=None), index=0)
    assert (facts.arch, facts.arch_family, facts.fp8) == ("gfx1999", "unknown", Fp8Format.NONE)
    assert facts.shared_memory_bytes is None


def test_unequal_gpus_keep_their_own_facts_and_say_how_they_are_numbered() -> None:
    seen = find_visible(MIXED, {})
    assert [(d.arch, d.index, d.fp8) for d in seen.devices] == [
        ("gfx942", 0, Fp8Format.E4M3FNUZ),
        ("gfx1100", 1, Fp8Format.NONE),
    ]
    assert all("the GPUs differ" in device.notes[1] for device in seen.devices)


def test_equal_gpus_have_no_such_note() -> None:
    seen = find_visible(KfdReading(is_present=True, gpus=(MI300X, MI300X)), {})
    assert seen.devices[0].notes == ("from the kernel's topology (KFD)",)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, ["gfx1100", "gfx942"]),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, ["gfx942", "gfx1100"]),  # HIP takes an empty one as not set
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["gfx942"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-55aa55aa55aa55aa"}, ["gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["gfx1100"]),
    ],
)
def test_variables_filter_in_the_runtimes_order(
    environ: dict[str, str], expected: list[str]
) -> None:
    assert archs(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected", "words"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,5,1"}, ["gfx942"], "HIP_VISIBLE_DEVICES: '5' names no GPU"),
        ({"HIP_VISIBLE_DEVICES": "cat"}, [], "HIP_VISIBLE_DEVICES: 'cat' names no device"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00"}, [], "ROCR_VISIBLE_DEVICES: 'GPU-00' names no GPU"),
        (
            {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"},
            [],
            "HIP_VISIBLE_DEVICES: '1' names no GPU",
        ),
    ],
)
def test_bad_entries_end_the_list_and_are_told(
    environ: dict[str, str], expected: list[str], words: str
) -> None:
    assert archs(environ) == expected
    assert words in find_visible(MIXED, environ).problem


def test_an_override_of_the_architecture_counts_and_is_told() -> None:
    laptop = dataclasses.replace(RX7900XTX, arch="gfx1103")
    reading = KfdReading(is_present=True, gpus=(laptop,))
    (device,) = find_visible(reading, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}).devices
    assert device.arch == "gfx1100"
    assert "a gfx1103 that HSA_OVERRIDE_GFX_VERSION makes a gfx1100" in device.notes
    (device,) = find_visible(reading, {"HSA_OVERRIDE_GFX_VERSION": "nonsense"}).devices
    assert device.arch == "gfx1103"


def test_torch_is_not_asked_while_its_runtime_is_down() -> None:
    assert torch_devices() is None
