"""Triton, the compiler of portable kernels: torch's CUDA build brings it."""

from __future__ import annotations

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import build_flags, import_library, installed_version

__all__ = ["SPEC", "probe"]

SPEC = VendorSpec(
    name="triton",
    distributions=("triton", "pytorch-triton"),
    module="triton",
    install="pip install torch (its CUDA build for Linux brings triton)",
    probe="attn_cuda._vendor.triton:probe",
)


def probe() -> VendorBuild:
    """Import the compiler and name the back ends that it has; its driver is left alone.

    Raises:
        ImportError: it has none for NVIDIA, or does not import.
    """
    backends = sorted(import_library("triton.backends").backends)
    if "nvidia" not in backends:
        raise ImportError(
            f"this triton compiles for {', '.join(backends) or 'nothing'}, not for nvidia: "
            "install the one of torch's CUDA build"
        )
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags({"backends": ",".join(backends)}),
    )
