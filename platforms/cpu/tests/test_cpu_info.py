"""Reading /proc/cpuinfo: hand-made texts, cut to the lines that matter."""

from __future__ import annotations

import pytest

from attn_cpu.cpu_info import best_isa, isa_of_torch_capability, parse_cpuinfo

SAPPHIRE_RAPIDS = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse2 avx f16c fma avx2 avx512f avx512dq avx512bw avx512vl avx_vnni avx512_bf16 \
avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8 arch_capabilities
bugs\t\t: spectre_v1

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse2 avx f16c fma avx2 avx512f avx512dq avx512bw avx512vl avx_vnni avx512_bf16 \
avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8 arch_capabilities
"""

HASWELL = """\
processor\t: 0
model name\t: Intel(R) Core(TM) i7-4790 CPU @ 3.60GHz
flags\t\t: fpu sse2 ssse3 fma sse4_2 avx f16c avx2
"""

ZEN4 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse2 fma avx f16c avx2 avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl \
avx512_bf16 avx512_vnni avx512_bitalg
"""

GRAVITON3 = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes crc32 fphp asimdhp asimddp sve svei8mm svebf16 i8mm bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""

BIG_LITTLE = """\
processor\t: 0
Features\t: fp asimd asimdhp
CPU implementer\t: 0x41
CPU part\t: 0xd05

processor\t: 1
Features\t: fp asimd asimdhp asimddp sve bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""

Z16 = """\
vendor_id       : IBM/S390
# processors    : 2
features\t: esan3 zarch stfle msa vx vxd vxe gs vxe2 vxp

processor 0: version = 00,  identification = 07D4F8,  machine = 3931
processor 1: version = 00,  identification = 07D4F8,  machine = 3931
"""


def test_sapphire_rapids_has_avx512_and_amx() -> None:
    info = parse_cpuinfo(SAPPHIRE_RAPIDS)
    assert info.model == "Intel(R) Xeon(R) Platinum 8480+"
    assert info.isa == (
        *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
        *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    )
    assert best_isa(info.isa) == "AMX"


def test_avx2_alone() -> None:
    info = parse_cpuinfo(HASWELL)
    assert info.isa == ("avx", "avx2", "fma", "f16c")
    assert best_isa(info.isa) == "AVX2"


def test_zen4_has_avx512_with_bf16_and_no_amx() -> None:
    info = parse_cpuinfo(ZEN4)
    assert info.model == "AMD EPYC 9654 96-Core Processor"
    assert "avx512_bf16" in info.isa
    assert not {"amx_tile", "avx512_fp16"} & set(info.isa)
    assert best_isa(info.isa) == "AVX-512 with bf16"


def test_graviton_is_named_by_its_core() -> None:
    info = parse_cpuinfo(GRAVITON3)
    assert info.model == "Arm Neoverse-V1"
    assert info.isa == ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "svebf16")
    assert best_isa(info.isa) == "SVE"


def test_only_what_every_usable_core_has_counts() -> None:
    assert parse_cpuinfo(BIG_LITTLE).isa == ("asimd", "asimdhp")
    big = parse_cpuinfo(BIG_LITTLE, cpus={1})
    assert (big.model, "sve" in big.isa) == ("Arm Neoverse-V1", True)
    little = parse_cpuinfo(BIG_LITTLE, cpus={0})
    assert little.model == "Arm core (implementer 0x41, part 0xd05)"


def test_s390x_states_features_once_for_all() -> None:
    info = parse_cpuinfo(Z16)
    assert info.isa == ("vx", "vxe", "vxe2")
    assert best_isa(info.isa) == "z vector"


@pytest.mark.parametrize("text", ["", "\n\n\n", "processor\t: 0\n", "no colon here", "flags\t:\n"])
def test_a_text_that_says_nothing_is_no_crash(text: str) -> None:
    info = parse_cpuinfo(text)
    assert (info.model, info.isa) == ("", ())
    assert best_isa(info.isa) == "scalar code"


@pytest.mark.parametrize(
    ("capability", "has", "has_not"),
    [("AVX2", "avx2", "avx512f"), ("AVX512", "avx512bw", "avx512_bf16"), ("SVE256", "sve", "sve2")],
)
def test_torch_dispatch_level_implies_no_more_than_it_asks_for(
    capability: str, has: str, has_not: str
) -> None:
    isa = isa_of_torch_capability(capability)
    assert has in isa
    assert has_not not in isa


def test_unknown_dispatch_level_implies_nothing() -> None:
    assert isa_of_torch_capability("DEFAULT") == ()
