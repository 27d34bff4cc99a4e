from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attn_shared.arch import ARCH_FORMS, Arch, parse_arch
from attn_shared.errors import UnknownNameError
from attn_shared.vendor import Fp8Format, Vendor

NONE, FN, FNUZ = Fp8Format.NONE, Fp8Format.E4M3FN, Fp8Format.E4M3FNUZ


def numbers(arch: Arch) -> tuple[int, int] | None:
    capability = arch.capability
    return None if capability is None else (capability.major, capability.minor)


@pytest.mark.parametrize(
    ("text", "canonical", "number", "family", "fp8", "shared_kib"),
    [
        ("sm_70", "sm_70", (7, 0), "volta", NONE, 96),
        ("7.5", "sm_75", (7, 5), "turing", NONE, 64),
        ("sm_80", "sm_80", (8, 0), "ampere", NONE, 163),
        ("8.6", "sm_86", (8, 6), "ampere", NONE, 99),
        ("sm_89", "sm_89", (8, 9), "ada", FN, 99),
        ("sm90", "sm_90", (9, 0), "hopper", FN, 227),
        ("compute_90", "sm_90", (9, 0), "hopper", FN, 227),
        ("9.0", "sm_90", (9, 0), "hopper", FN, 227),
        ("SM_100", "sm_100", (10, 0), "blackwell", FN, 227),
        ("sm_103", "sm_103", (10, 3), "blackwell", FN, 227),
        ("sm_107", "sm_107", (10, 7), "rubin", FN, 327),
        ("sm_110", "sm_110", (11, 0), "blackwell-thor", FN, 227),
        ("sm_120", "sm_120", (12, 0), "blackwell-consumer", FN, 99),
        (" 12.1 ", "sm_121", (12, 1), "blackwell-consumer", FN, 99),
        ("gfx906", "gfx906", (9, 0), "gcn5", NONE, 64),
        ("gfx908", "gfx908", (9, 0), "cdna1", NONE, 64),
        ("gfx90a", "gfx90a", (9, 0), "cdna2", NONE, 64),
        ("gfx90c", "gfx90c", (9, 0), "gcn5", NONE, 64),
        ("gfx940", "gfx940", (9, 4), "cdna3", FNUZ, 64),
        ("gfx941", "gfx941", (9, 4), "cdna3", FNUZ, 64),
        ("GFX942", "gfx942", (9, 4), "cdna3", FNUZ, 64),
        ("gfx950", "gfx950", (9, 5), "cdna4", FN, 160),
        ("gfx1030", "gfx1030", (10, 3), "rdna2", NONE, 64),
        ("gfx1100", "gfx1100", (11, 0), "rdna3", NONE, 64),
        ("gfx1151", "gfx1151", (11, 5), "rdna3.5", NONE, 64),
        ("gfx1201", "gfx1201", (12, 0), "rdna4", FN, 64),
        ("gfx1250", "gfx1250", (12, 5), "cdna5", FN, 320),
        ("pvc", "pvc", None, "xe-hpc", NONE, 128),
        ("bmg", "bmg", None, "xe2", NONE, 128),
        ("lnl", "lnl", None, "xe2", NONE, 128),
        ("intel_gpu_bmg_g21", "bmg", None, "xe2", NONE, 128),
        ("dg2-g10", "dg2", None, "xe-hpg", NONE, 64),
        ("ptl_h", "ptl", None, "xe3", NONE, None),
        ("cri", "cri", None, "xe3p", FN, None),
        ("x86_64", "x86_64", None, "x86", NONE, None),
        ("AMD64", "x86_64", None, "x86", NONE, None),
        ("aarch64", "aarch64", None, "arm", NONE, None),
        ("arm64", "aarch64", None, "arm", NONE, None),
    ],
)
def test_known_names(
    text: str,
    canonical: str,
    number: tuple[int, int] | None,
    family: str,
    fp8: Fp8Format,
    shared_kib: int | None,
) -> None:
    arch = parse_arch(text)
    assert (arch.canonical, numbers(arch), arch.family, arch.fp8) == (
        canonical,
        number,
        family,
        fp8,
    )
    assert arch.shared_memory_bytes == (None if shared_kib is None else shared_kib * 1024)
    assert arch.is_known
    assert not arch.is_generic


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("sm_90", Vendor.NVIDIA),
        ("gfx90a", Vendor.AMD),
        ("pvc", Vendor.INTEL),
        ("x86_64", Vendor.CPU),
    ],
)
def test_vendor_of_a_name_and_of_its_capability(text: str, vendor: Vendor) -> None:
    arch = parse_arch(text)
    assert arch.vendor is vendor
    if arch.capability is not None:
        assert arch.capability.vendor is vendor


@pytest.mark.parametrize(
    ("text", "canonical", "suffix"),
    [
        ("sm_90a", "sm_90", "a"),
        ("9.0a", "sm_90", "a"),
        ("sm_100f", "sm_100", "f"),
        ("12.1a", "sm_121", "a"),
        ("sm_90", "sm_90", ""),
    ],
)
def test_nvidia_suffix_is_apart_from_the_name(text: str, canonical: str, suffix: str) -> None:
    arch = parse_arch(text)
    assert (arch.canonical, arch.suffix, arch.family) == (
        canonical,
        suffix,
        parse_arch(canonical).family,
    )


@pytest.mark.parametrize(
    ("text", "canonical", "features"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942", ("sramecc+", "xnack-")),
        ("gfx90a:xnack+", "gfx90a", ("xnack+",)),
        ("amdgcn-amd-amdhsa--gfx1201", "gfx1201", ()),
        ("amdgcn-amd-amdhsa--gfx9-4-generic:xnack+", "gfx9-4-generic", ("xnack+",)),
        ("gfx1250:gfx1250-b0-specific+", "gfx1250", ("gfx1250-b0-specific+",)),
        ("8.0+PTX", "sm_80", ("ptx",)),
    ],
)
def test_features_are_apart_from_the_name(
    text: str, canonical: str, features: tuple[str, ...]
) -> None:
    arch = parse_arch(text)
    assert (arch.canonical, arch.features) == (canonical, features)


@pytest.mark.parametrize(
    ("text", "number", "family", "fp8"),
    [
        ("gfx9-generic", (9, 0), "gcn5", NONE),
        # gfx942 is e4m3fnuz, gfx950 is e4m3fn: what both share is none.
        ("gfx9-4-generic", (9, 4), "cdna3", NONE),
        ("gfx10-1-generic", (10, 1), "rdna1", NONE),
        ("gfx10-3-generic", (10, 3), "rdna2", NONE),
        ("gfx11-generic", (11, 0), "rdna3", NONE),
        ("gfx12-generic", (12, 0), "rdna4", FN),
        ("gfx12-5-generic", (12, 5), "cdna5", FN),
        ("xe2", None, "xe2", NONE),
        ("xe2-hpg", None, "xe2", NONE),
        ("xe-hpc", None, "xe-hpc", NONE),
    ],
)
def test_generic_names(
    text: str, number: tuple[int, int] | None, family: str, fp8: Fp8Format
) -> None:
    arch = parse_arch(text)
    assert (numbers(arch), arch.family, arch.fp8) == (number, family, fp8)
    assert arch.is_generic
    assert arch.is_known


def test_a_generic_intel_name_claims_only_what_its_members_share() -> None:
    assert parse_arch("xe2").shared_memory_bytes == 128 * 1024
    assert parse_arch("xe3p").fp8 is NONE  # cri has fp8; of nvl-p we do not know


@pytest.mark.parametrize(
    ("text", "vendor", "canonical", "number"),
    [
        ("gfx1999", Vendor.AMD, "gfx1999", (19, 9)),
        ("gfx1202", Vendor.AMD, "gfx1202", (12, 0)),
        ("gfx943", Vendor.AMD, "gfx943", (9, 4)),
        ("gfx13-generic", Vendor.AMD, "gfx13-generic", (13, 0)),
        ("sm_77", Vendor.NVIDIA, "sm_77", (7, 7)),
        ("intel_gpu_jgs", Vendor.INTEL, "intel_gpu_jgs", None),
    ],
)
def test_unknown_but_well_formed_is_an_answer_and_no_near_match(
    text: str, vendor: Vendor, canonical: str, number: tuple[int, int] | None
) -> None:
    arch = parse_arch(text)
    assert (arch.vendor, arch.canonical, numbers(arch)) == (vendor, canonical, number)
    assert not arch.is_known
    assert (arch.family, arch.fp8, arch.shared_memory_bytes) == ("unknown", NONE, None)


def test_unknown_nvidia_keeps_what_ptx_keeps() -> None:
    arch = parse_arch("sm_140")
    assert (arch.is_known, arch.family, arch.fp8) == (False, "unknown", FN)


def test_gfx1250_is_no_rdna4() -> None:
    rdna4 = {"gfx1200", "gfx1201", "gfx12-generic"}
    every = [*rdna4, "gfx1250", "gfx1251", "gfx12-5-generic", "gfx1202"]
    assert {name for name in every if parse_arch(name).family == "rdna4"} == rdna4


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "foo",
        "gfx",
        "gfx9",
        "gfx90",
        "gfx90g",
        "gfx090a",
        "gfx123456",
        "gfx-generic",
        "gfx9-44-generic",
        "gfx942:",
        "gfx942:xnack",
        "gfx942:xnack+:xnack-",
        "sm_",
        "sm_9",
        "sm_1000",
        "sm_09",
        "sm_90b",
        "sm_80a",  # "a" begins with 9.0
        "sm_90f",  # "f" begins with 10.0
        "9",
        "90",
        "9.",
        "9.10",
        "compute",
        "intel_gpu_",
        "intel_gpu_é",
        "sm_\u0669\u0660",  # digits, though not ASCII
        "x86",
    ],
)
def test_garbage_lists_the_forms(text: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse_arch(text)
    assert all(form in str(caught.value) for form in ARCH_FORMS)
    assert repr(text) in str(caught.value)


@given(
    st.one_of(
        st.text(),
        st.from_regex(r"(gfx|sm_|compute_|intel_gpu_)?[0-9a-f.:+_-]{0,12}(generic)?"),
    )
)
@example("gfx" + "9" * 5000)
@example("sm_" + "9" * 5000)
@settings(derandomize=True, max_examples=400)
def test_no_text_raises_anything_but_unknown_name(text: str) -> None:
    try:
        arch = parse_arch(text)
    except UnknownNameError:
        return
    assert parse_arch(arch.canonical).canonical == arch.canonical
    assert (arch.family == "unknown") is not arch.is_known


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("gfx906", 64), ("gfx90a", 64), ("gfx942:sramecc+:xnack-", 64), ("gfx950", 64)),
        *(("gfx1100", 32), ("gfx1201", 32), ("gfx1250", 32), ("gfx11-generic", 32)),
        *(("gfx1999", None), ("sm_90", 32), ("bmg", None), ("x86_64", None)),
    ],
)
def test_lanes_of_a_wave(name: str, size: int | None) -> None:
    assert parse_arch(name).wave_size == size
