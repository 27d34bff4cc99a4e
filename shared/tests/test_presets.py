from __future__ import annotations

import pytest

from attn_shared.device import PRESETS, Fp8Format, Vendor, preset
from attn_shared.errors import UnknownNameError
from attn_shared.presets import DATASHEETS

GIB = 2**30
NONE, FN, FNUZ = Fp8Format.NONE, Fp8Format.E4M3FN, Fp8Format.E4M3FNUZ


@pytest.mark.parametrize(
    ("name", "vendor", "arch", "capability", "family", "fp8"),
    [
        ("t4", Vendor.NVIDIA, "sm_75", "7.5", "turing", NONE),
        ("a100", Vendor.NVIDIA, "sm_80", "8.0", "ampere", NONE),
        ("l40s", Vendor.NVIDIA, "sm_89", "8.9", "ada", FN),
        ("rtx4090", Vendor.NVIDIA, "sm_89", "8.9", "ada", FN),
        ("h100", Vendor.NVIDIA, "sm_90", "9.0", "hopper", FN),
        ("h200", Vendor.NVIDIA, "sm_90", "9.0", "hopper", FN),
        ("b200", Vendor.NVIDIA, "sm_100", "10.0", "blackwell", FN),
        ("b300", Vendor.NVIDIA, "sm_103", "10.3", "blackwell", FN),
        ("thor", Vendor.NVIDIA, "sm_110", "11.0", "blackwell-thor", FN),
        ("rtx5090", Vendor.NVIDIA, "sm_120", "12.0", "blackwell-consumer", FN),
        ("gb10", Vendor.NVIDIA, "sm_121", "12.1", "blackwell-consumer", FN),
        ("mi250", Vendor.AMD, "gfx90a", "9.0", "cdna2", NONE),
        ("mi300x", Vendor.AMD, "gfx942", "9.4", "cdna3", FNUZ),
        ("mi325x", Vendor.AMD, "gfx942", "9.4", "cdna3", FNUZ),
        ("mi355x", Vendor.AMD, "gfx950", "9.5", "cdna4", FN),
        ("rx7900xtx", Vendor.AMD, "gfx1100", "11.0", "rdna3", NONE),
        ("strixhalo", Vendor.AMD, "gfx1151", "11.5", "rdna3.5", NONE),
        ("rx9070xt", Vendor.AMD, "gfx1201", "12.0", "rdna4", FN),
        ("max1550", Vendor.INTEL, "pvc", None, "xe-hpc", NONE),
        ("b60", Vendor.INTEL, "bmg", None, "xe2", NONE),
        ("spr", Vendor.CPU, "x86_64", None, "x86", NONE),
        ("graviton4", Vendor.CPU, "aarch64", None, "arm", NONE),
        ("genericcpu", Vendor.CPU, "x86_64", None, "x86", NONE),
    ],
)
def test_identity(
    name: str, vendor: Vendor, arch: str, capability: str | None, family: str, fp8: Fp8Format
) -> None:
    facts = preset(name)
    number = None if facts.capability is None else str(facts.capability)
    assert (facts.vendor, facts.arch, number) == (vendor, arch, capability)
    assert (facts.arch_family, facts.fp8) == (family, fp8)


@pytest.mark.parametrize(
    ("name", "memory_gib", "compute_units", "bandwidth_gb_per_s", "shared_memory_bytes"),
    [
        ("a100", 80, 108, 2039, 166_912),
        ("h200", 141, 132, 4800, 232_448),
        ("rtx5090", 32, 170, 1792, 101_376),
        ("mi250", 64, 104, 1638.4, 65_536),  # one die: half of 128 GiB, 208 CUs, 3276.8 GB/s
        ("mi355x", 288, 256, 8000, 163_840),
        ("max1550", 64, 64, 1638.4, 131_072),  # one stack: half of the card likewise
        ("b60", 24, 20, 456, 131_072),
    ],
)
def test_figures(
    name: str,
    memory_gib: int,
    compute_units: int,
    bandwidth_gb_per_s: float,
    shared_memory_bytes: int,
) -> None:
    facts = preset(name)
    assert facts.memory_bytes == memory_gib * GIB
    assert facts.compute_units == compute_units
    assert facts.memory_bandwidth_bytes_per_s == bandwidth_gb_per_s * 1e9
    assert facts.shared_memory_bytes == shared_memory_bytes


def test_cpus_differ_in_their_instruction_sets() -> None:
    assert preset("spr").has_isa("amx_bf16")
    assert preset("spr").has_isa("avx512_bf16")
    assert preset("genericcpu").isa == ("avx2", "fma", "f16c")
    assert not preset("graviton4").has_isa("avx2")


@pytest.mark.parametrize("name", sorted(DATASHEETS))
def test_every_preset_is_simulated_known_and_sourced(name: str) -> None:
    facts = PRESETS[name]
    assert facts.is_simulated
    assert facts.arch_family != "unknown"
    assert (facts.index, facts.uuid) == (None, None)
    assert facts.notes[-1] == f"figures: {DATASHEETS[name].source}"
    assert name.isalnum()
    assert name == name.lower()


def test_half_cards_say_so() -> None:
    assert any("GCD" in note for note in preset("mi250").notes)
    assert any("stack" in note for note in preset("max1550").notes)


@pytest.mark.parametrize("spelling", ["RX 7900 XTX", "rx-7900-xtx", "RX7900XTX", "rx_7900_xtx"])
def test_spelling_does_not_matter(spelling: str) -> None:
    assert preset(spelling) is PRESETS["rx7900xtx"]


def test_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'h200'"):
        preset("h2000")


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["h200"] = PRESETS["h100"]  # type: ignore[index]
