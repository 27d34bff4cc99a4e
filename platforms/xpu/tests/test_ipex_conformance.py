"""The contract's rules through the stubs of both builds of intel-extension-for-pytorch.

`nox -s ipex` runs them on the CPU build itself; docs/backends/ipex.md has what it found.
"""

from __future__ import annotations

import pytest
import torch
from xpu_testing import failed_of, stubbed

from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.vendors.ipex import IPEX_CPU, IPEX_XPU
from attn_shared.device import DeviceFacts, preset
from attn_xpu.backends.ipex import IpexBackend

PAGED = {"flash_attn_varlen_func", "apply_function"}


@pytest.mark.parametrize(
    ("stub", "device", "calls"),
    [
        (
            IPEX_CPU,
            preset("spr"),
            {*PAGED, "single_query_cached_kv_attention", "reshape_and_cache"},
        ),
        (IPEX_XPU, preset("max1550"), PAGED),
    ],
    ids=["cpu", "xpu"],
)
def test_each_build_keeps_the_contract(
    stub: VendorStub,
    device: DeviceFacts,
    calls: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    with stubbed(stub, IpexBackend, device) as (recorder, subject):
        failed, passed = failed_of(subject)
    assert failed == {}
    assert passed > 250
    assert {call.function for call in recorder.calls} == calls
    assert all(not call.positional for call in recorder.calls)
