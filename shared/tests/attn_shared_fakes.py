"""Devices, libraries, backends and platforms that exist for the tests alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from attn_shared.backend import AttentionBackend
from attn_shared.capability import Capability, DeviceLimit, SizeSet
from attn_shared.device import DeviceCapability, DeviceFacts, Fp8Format, Vendor
from attn_shared.inventory import Inventory, VendorEntry, VendorSpec, VendorStatus
from attn_shared.limits import MultipleOf
from attn_shared.platform import Availability, Candidate, Platform
from attn_shared.registry import BACKEND_GROUP, PLATFORM_GROUP, BackendRegistry
from attn_shared.request import AttentionRequest

GPU = DeviceFacts(
    vendor=Vendor.NVIDIA,
    name="NVIDIA Fake",
    arch="sm_90",
    capability=DeviceCapability(vendor=Vendor.NVIDIA, major=9, minor=0),
    arch_family="hopper",
    fp8=Fp8Format.E4M3FN,
)

CPU = DeviceFacts(
    vendor=Vendor.CPU,
    name="Fake CPU",
    arch="x86_64",
    capability=None,
    arch_family="x86",
    fp8=Fp8Format.NONE,
    isa=("avx2", "avx512_bf16"),
)


def request(**options: Any) -> AttentionRequest:
    """Return a small request with some options."""
    return AttentionRequest(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 64, **options})


def capability(**options: Any) -> Capability:
    """Return a capability of few features on any NVIDIA device, with some options."""
    plain = {
        "devices": (DeviceLimit(vendor=Vendor.NVIDIA),),
        "dtypes": frozenset({torch.bfloat16, torch.float16}),
        "head_sizes": SizeSet(minimum=8, maximum=256, multiple_of=8),
        "block_sizes": (MultipleOf(16),),
    }
    return Capability(**{**plain, **options})


def library(name: str, status: VendorStatus = VendorStatus.PRESENT, **facts: Any) -> VendorEntry:
    """Return what is known of a library."""
    return VendorEntry(name=name, status=status, install=f"pip install {name}", **facts)
