"""FlashAttention 3 as the distribution fa3-fwd builds it: without paged keys and values.

It is recognised so that a user sees why it serves no paged cache; no extra installs it.
"""

from __future__ import annotations

from types import ModuleType

from attn_cuda._vendor import flash_attn_3
from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import import_library

__all__ = ["SPEC", "interface", "probe"]

SPEC = VendorSpec(
    name="fa3_fwd",
    distributions=("fa3-fwd",),
    module="fa3_fwd_interface",
    install="pip install fa3-fwd (which serves no paged cache: take tokenspeed-fa3 instead)",
    probe="attn_cuda._vendor.fa3_fwd:probe",
)


def interface() -> ModuleType:
    """Return the module that holds its calls.

    Raises:
        ImportError: with the loader's own words.
    """
    return import_library("fa3_fwd_interface")


def probe() -> VendorBuild:
    """Import the library and read what it was built with: "pagedkv" = "off" in 0.0.3.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    return flash_attn_3.describe(SPEC, "fa3_fwd_interface", "fa3_fwd_config")
