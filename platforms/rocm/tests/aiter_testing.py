"""What the tests of AITER's backends share: both releases' stubs, devices, layers, batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.suite import stubbed_subject
from attn_conformance.stubs.vendors.aiter import AITER_0_1_7, AITER_HEAD
from attn_conformance.subject import Subject
from attn_rocm import _aiter_loaded
from attn_rocm.backends.rocm_aiter_fa import AiterFlashBackend
from attn_rocm.platform import RocmPlatform
from attn_shared.backend import AttentionBackend
from attn_shared.device import DeviceFacts, preset
from attn_shared.inventory import Inventory, VendorBuild, VendorEntry, VendorStatus
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest
from attn_shared.spec import LayerSpec

__all__ = [
    "HEAD",
    "MI300X",
    "MI355X",
    "STUBS",
    "WHEEL",
    "common_of",
    "inventory",
    "layer_object",
    "layer_spec",
    "request",
    "stubbed",
]

MI300X = preset("mi300x")
MI355X = preset("mi355x")

WHEEL = "wheel"
HEAD = "head"

STUBS: dict[str, VendorStub] = {WHEEL: AITER_0_1_7, HEAD: AITER_HEAD}


def request(**fields: Any) -> AttentionRequest:
    return AttentionRequest(
        **{"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16, **fields}
    )


def inventory(found: VendorBuild | str | None) -> Inventory:
    """A build is loaded, None is taken as complete, a text is what a broken library says."""
    if isinstance(found, str):
        status, error = VendorStatus.BROKEN, found
        return Inventory((VendorEntry(name="aiter", status=status, error=error, install="pip"),))
    status = VendorStatus.ASSUMED if found is None else VendorStatus.LOADED
    return Inventory((VendorEntry(name="aiter", status=status, version="1.0", build=found),))


@contextmanager
def stubbed(
    release: str,
    backend: type[AttentionBackend] = AiterFlashBackend,
    device: DeviceFacts = MI300X,
) -> Iterator[tuple[Recorder, Subject]]:
    """Let a release be there, found and loaded as on a device."""
    _aiter_loaded.forget()
    try:
        with stub_vendor(STUBS[release]) as recorder:
            yield recorder, stubbed_subject(backend, device, RocmPlatform().vendor_specs())
    finally:
        _aiter_loaded.forget()


def layer_spec(**fields: Any) -> LayerSpec:
    sizes = {"num_kv_heads": 2, "head_size": 64, "head_size_v": 64, "block_size": 16}
    for name in sizes:
        sizes[name] = fields.pop(name, sizes[name])
    cache = FullAttentionSpec(**{**sizes, "dtype": torch.bfloat16, **fields.pop("cache", {})})
    sizes.pop("block_size")
    return LayerSpec(
        **{
            **sizes,
            "num_heads": 4,
            "scale": 0.25,
            "dtype": torch.bfloat16,
            "kv_cache_spec": cache,
            **fields,
        }
    )


def common_of(
    query_lens: list[int], seq_lens: list[int], block_size: int = 16, **options: Any
) -> CommonAttentionMetadata:
    width = max(1, *(-(-length // block_size) for length in seq_lens))
    table = torch.arange(len(seq_lens) * width, dtype=torch.int32).reshape(-1, width)
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens, seq_lens=seq_lens, block_table=table, **options
    )


def layer_object(**values: Any) -> Any:
    plain = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "sinks": None, "alibi_slopes": None}
    return SimpleNamespace(**{**plain, **values})
