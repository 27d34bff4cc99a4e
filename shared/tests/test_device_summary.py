"""Devices in words."""

from __future__ import annotations

from attn_shared.device import DeviceFacts, Fp8Format, Vendor
from attn_shared.device_summary import summarize


def xeon(name: str) -> DeviceFacts:
    return DeviceFacts(
        vendor=Vendor.CPU,
        name=name,
        arch="x86_64",
        capability=None,
        arch_family="x86",
        fp8=Fp8Format.NONE,
    )


def test_equal_devices_are_counted_in_the_order_of_the_first() -> None:
    devices = [xeon("Xeon"), xeon("EPYC"), xeon("Xeon")]
    assert summarize(devices) == "2 x Xeon (x86_64), 1 x EPYC (x86_64)"


def test_no_device_is_no_word() -> None:
    assert summarize([]) == ""
