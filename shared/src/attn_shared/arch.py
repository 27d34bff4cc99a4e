"""Names of architectures, as drivers, compilers and build settings write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from attn_shared import _arch_tables as tables
from attn_shared._arch_tables import ArchTraits
from attn_shared.errors import UnknownNameError
from attn_shared.vendor import DeviceCapability, Fp8Format, Vendor

__all__ = ["ARCH_FORMS", "UNKNOWN_FAMILY", "Arch", "parse_arch"]

UNKNOWN_FAMILY = "unknown"

ARCH_FORMS = (
    "sm_90, sm_90a, sm_100f, compute_90, 9.0, 9.0a, 9.0+PTX",
    "gfx942, gfx942:sramecc+:xnack-, gfx11-generic",
    "pvc, bmg, lnl, intel_gpu_bmg_g21, xe2",
    "x86_64, aarch64",
)
"""Forms that `parse_arch` reads, by example, a vendor a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """What the name of an architecture says.

    Attributes:
        vendor: whose it is.
        canonical: the name without features and suffix, "sm_90", "gfx942", "bmg", "x86_64".
        capability: the vendor's number; of an AMD generic target the lowest of its members;
            None for Intel and CPU.
        family: the generation, or `UNKNOWN_FAMILY`.
        features: what followed the name, "sramecc+", "xnack-", "ptx".
        suffix: NVIDIA's "a" (this very architecture) or "f" (this family), else "".
        is_generic: the name stands for several architectures: "gfx11-generic", "xe2".
        is_known: the name is in our tables; if not, nothing is guessed from its neighbours.
        fp8: the e4m3 flavour of its matrix hardware.
        shared_memory_bytes: the most that one workgroup can have; None if unknown.
    """

    vendor: Vendor
    canonical: str
    capability: DeviceCapability | None = None
    family: str = UNKNOWN_FAMILY
    features: tuple[str, ...] = ()
    suffix: str = ""
    is_generic: bool = False
    is_known: bool = False
    fp8: Fp8Format = Fp8Format.NONE
    shared_memory_bytes: int | None = None

    @property
    def wave_size(self) -> int | None:
        """Lanes that run together: a warp, a wave; None where unknown, or the compiler's choice."""
        if self.vendor is Vendor.NVIDIA:
            return tables.NVIDIA_WARP
        if self.vendor is not Vendor.AMD or not self.is_known:
            return None
        return 64 if self.family in tables.AMD_WAVE64 else 32


_NVIDIA_NAME = re.compile(r"(?:sm|compute)_?([1-9][0-9]?)([0-9])([af]?)(\+ptx)?")
_NVIDIA_NUMBER = re.compile(r"([1-9][0-9]?)\.([0-9])([af]?)(\+ptx)?")
# LLVM writes major in decimal and the last two digits, minor and stepping, in hexadecimal.
_AMD_NAME = re.compile(r"(gfx([1-9][0-9]?)([0-9a-f])[0-9a-f])((?::[a-z0-9_-]+[+-])*)")
_AMD_GENERIC = re.compile(r"(gfx([1-9][0-9]?)(?:-([0-9]))?-generic)((?::[a-z0-9_-]+[+-])*)")
_AMD_TRIPLE = "amdgcn-amd-amdhsa--"
_INTEL_PREFIX = "intel_gpu_"
_INTEL_UNKNOWN = re.compile(r"intel_gpu_[a-z0-9_]+")


@lru_cache(maxsize=512)
def parse_arch(text: str) -> Arch:
    """Read the name of an architecture as it occurs in drivers, compilers and build settings.

    A bare x.y is NVIDIA's, as in TORCH_CUDA_ARCH_LIST. A well-formed name that is in no table
    (gfx1999, sm_77) is an answer: `is_known` is False and the family is `UNKNOWN_FAMILY`.

    Raises:
        UnknownNameError: no form of `ARCH_FORMS` fits, or the suffix does not exist there.
    """
    name = text.strip().lower()
    arch = _parse_nvidia(name) or _parse_amd(name) or _parse_intel(name) or _parse_cpu(name)
    if arch is None:
        raise UnknownNameError.for_name(
            "architecture", text, ARCH_FORMS, hint="write it in one of these forms."
        )
    return arch


def _parse_nvidia(name: str) -> Arch | None:
    match = _NVIDIA_NAME.fullmatch(name) or _NVIDIA_NUMBER.fullmatch(name)
    if match is None:
        return None
    number = int(match[1]), int(match[2])
    suffix = match[3]
    if number < tables.NVIDIA_FIRST_SUFFIX[suffix]:
        return None
    traits = tables.NVIDIA.get(number)
    return Arch(
        vendor=Vendor.NVIDIA,
        canonical=f"sm_{number[0]}{number[1]}",
        capability=DeviceCapability(vendor=Vendor.NVIDIA, major=number[0], minor=number[1]),
        family=traits.family if traits else UNKNOWN_FAMILY,
        features=("ptx",) if match[4] else (),
        suffix=suffix,
        is_known=traits is not None,
        fp8=Fp8Format.E4M3FN if number >= tables.NVIDIA_FIRST_FP8 else Fp8Format.NONE,
        shared_memory_bytes=traits.shared_memory_bytes if traits else None,
    )


def _parse_amd(name: str) -> Arch | None:
    name = name.removeprefix(_AMD_TRIPLE)
    generic = _AMD_GENERIC.fullmatch(name)
    match = generic or _AMD_NAME.fullmatch(name)
    if match is None:
        return None
    features = tuple(match[4].split(":")[1:])
    if len({feature[:-1] for feature in features}) < len(features):
        return None
    major = int(match[2])
    # As torch for ROCm reports it: gfx90a is 9.0, for its last letter is the stepping.
    minor = int(match[3] or "0", 16)
    return _from_traits(
        Vendor.AMD,
        match[1],
        tables.AMD.get(match[1]),
        capability=DeviceCapability(vendor=Vendor.AMD, major=major, minor=minor),
        features=features,
        is_generic=generic is not None,
    )


def _parse_intel(name: str) -> Arch | None:
    target = name.removeprefix(_INTEL_PREFIX).replace("_", "-")
    target = tables.INTEL_ALIASES.get(target, target)
    if target in tables.INTEL_FAMILIES:
        shared = [traits for traits in tables.INTEL.values() if traits.family == target]
        traits = shared[0] if len(set(shared)) == 1 else ArchTraits(target)
        return _from_traits(Vendor.INTEL, target, traits, is_generic=True)
    if target in tables.INTEL:
        return _from_traits(Vendor.INTEL, target, tables.INTEL[target])
    if _INTEL_UNKNOWN.fullmatch(name):
        return _from_traits(Vendor.INTEL, name, None)
    return None


def _parse_cpu(name: str) -> Arch | None:
    name = tables.CPU_ALIASES.get(name, name)
    if name not in tables.CPU:
        return None
    return _from_traits(Vendor.CPU, name, ArchTraits(tables.CPU[name]))


def _from_traits(
    vendor: Vendor,
    canonical: str,
    traits: ArchTraits | None,
    *,
    capability: DeviceCapability | None = None,
    features: tuple[str, ...] = (),
    is_generic: bool = False,
) -> Arch:
    known = traits or ArchTraits(UNKNOWN_FAMILY)
    return Arch(
        vendor=vendor,
        canonical=canonical,
        capability=capability,
        family=known.family,
        features=features,
        is_generic=is_generic,
        is_known=traits is not None,
        fp8=known.fp8,
        shared_memory_bytes=known.shared_memory_bytes,
    )
