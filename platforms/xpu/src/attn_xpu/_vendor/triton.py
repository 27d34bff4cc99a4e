"""Triton, the compiler of portable kernels: torch's XPU build brings it."""

from __future__ import annotations

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import build_flags, import_library, installed_version

__all__ = ["SPEC", "probe"]

SPEC = VendorSpec(
    name="triton",
    distributions=("triton-xpu", "pytorch-triton-xpu", "triton"),
    module="triton",
    install="pip install torch (its XPU build brings triton; pytorch.org/get-started/locally "
    "gives the command)",
    probe="attn_xpu._vendor.triton:probe",
)


def probe() -> VendorBuild:
    """Import the compiler and name the back ends that it has; its driver is left alone.

    Raises:
        ImportError: it has none for Intel, or does not import.
    """
    backends = sorted(import_library("triton.backends").backends)
    if "intel" not in backends:
        raise ImportError(
            f"this triton compiles for {', '.join(backends) or 'nothing'}, not for intel: "
            "install the one of torch's XPU build"
        )
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags({"backends": ",".join(backends)}),
    )
