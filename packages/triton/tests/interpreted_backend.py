"""TRITON_ATTN on a CPU, under Triton's interpreter as the tests mend it."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

from attn_shared.capability import Capability, DeviceLimit
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.inventory import Inventory
from attn_triton.backends.triton_attn import TritonAttentionBackend


def _mend() -> None:
    """Do in this process what conftest.py does for the tests' own."""
    path = Path(__file__).with_name("conftest.py")
    found = importlib.util.spec_from_file_location("attn_triton_conftest", path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} does not load")
    conftest = importlib.util.module_from_spec(found)
    found.loader.exec_module(conftest)
    conftest.mend_interpreter()


if os.environ.get("TRITON_INTERPRET") == "1":
    _mend()


class InterpretedBackend(TritonAttentionBackend):
    name = "TRITON_ATTN_INTERPRETED"
    vendor_libraries = ()

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        served = super().capability(device, inventory)
        return replace(served, devices=(DeviceLimit(vendor=Vendor.CPU),))
