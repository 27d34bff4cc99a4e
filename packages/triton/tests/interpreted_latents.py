"""TRITON_MLA on a CPU, under Triton's interpreter as the tests mend it."""

from __future__ import annotations

from dataclasses import replace

import interpreted_backend  # noqa: F401  mends the interpreter

from attn_shared.capability import Capability, DeviceLimit
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.inventory import Inventory
from attn_triton.backends.triton_mla import TritonMLABackend


class InterpretedLatents(TritonMLABackend):
    name = "TRITON_MLA_INTERPRETED"
    vendor_libraries = ()

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        served = super().capability(device, inventory)
        return replace(served, devices=(DeviceLimit(vendor=Vendor.CPU),))
