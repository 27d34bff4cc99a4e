"""What the tests of FLASHINFER share: the library's stubs, layers of heads that it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fa_testing import layer_spec

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.suite import stubbed_subject
from attn_conformance.stubs.vendors.flashinfer import FLASHINFER, FLASHINFER_0_6_13
from attn_conformance.subject import Subject
from attn_cuda import _fi_loaded
from attn_cuda.backends.flashinfer import FlashInferBackend
from attn_cuda.platform import CudaPlatform
from attn_shared.backend import AttentionBackend
from attn_shared.device import DeviceFacts, preset
from attn_shared.spec import LayerSpec

__all__ = ["B200", "H200", "RELEASES", "fi_layer", "fi_stubbed"]

H200 = preset("h200")
B200 = preset("b200")

CUBINS = VendorStub(distribution="flashinfer-cubin", version="0.7.4", modules={})

RELEASES: dict[str, VendorStub] = {"0.6.13": FLASHINFER_0_6_13, "0.7.4": FLASHINFER}


@contextmanager
def fi_stubbed(
    release: str = "0.7.4",
    device: DeviceFacts = H200,
    backend: type[AttentionBackend] = FlashInferBackend,
) -> Iterator[tuple[Recorder, Subject]]:
    """Let one release be there, found and loaded as on a device."""
    _fi_loaded.forget()
    try:
        with stub_vendor(RELEASES[release], CUBINS) as recorder:
            yield recorder, stubbed_subject(backend, device, CudaPlatform().vendor_specs())
    finally:
        _fi_loaded.forget()


def fi_layer(**fields: Any) -> LayerSpec:
    """Return a layer of 4 heads over 2 of width 64, in blocks of 16."""
    return layer_spec(**{"head_size": 64, "head_size_v": 64, **fields})
