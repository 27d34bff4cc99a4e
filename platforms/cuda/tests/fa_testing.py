"""What the tests of FLASH_ATTN share: requests, inventories as probes would find them, layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.suite import stubbed_subject
from attn_conformance.stubs.vendors.fa3_fwd import FA3_FWD
from attn_conformance.stubs.vendors.flash_attn_2 import FLASH_ATTN_2
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3
from attn_conformance.stubs.vendors.flash_attn_4 import FLASH_ATTN_4
from attn_conformance.stubs.vendors.vllm_flash_attn import VLLM_FLASH_ATTN_2, VLLM_FLASH_ATTN_3
from attn_conformance.subject import Subject
from attn_cuda import _fa_loaded
from attn_cuda.backends.flash_attn import FlashAttnBackend
from attn_cuda.platform import CudaPlatform
from attn_shared.device import DeviceFacts, preset
from attn_shared.inventory import Inventory, VendorBuild, VendorEntry, VendorStatus
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest
from attn_shared.spec import LayerSpec

__all__ = [
    "H200",
    "STUBS",
    "TOKENSPEED",
    "build_of",
    "common_of",
    "inventory",
    "layer_object",
    "layer_spec",
    "request",
    "stubbed",
]

H200 = preset("h200")

STUBS: dict[str, VendorStub] = {
    "fa3_fwd": FA3_FWD,
    "flash_attn": FLASH_ATTN_2,
    "flash_attn_3": FLASH_ATTN_3,
    "flash_attn_4": FLASH_ATTN_4,
    "vllm_flash_attn_2": VLLM_FLASH_ATTN_2,
    "vllm_flash_attn_3": VLLM_FLASH_ATTN_3,
}

# What tokenspeed-fa3 3.0.0.post20260810 says of itself.
TOKENSPEED = {"softcap": "off", "hdimdiff64": "off", "hdimdiff192": "off", "pagedkv": "on"}


def request(**fields: Any) -> AttentionRequest:
    return AttentionRequest(
        **{"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16, **fields}
    )


def build_of(flags: dict[str, str] | None = None, *arguments: str) -> VendorBuild:
    return VendorBuild(
        version="1.0",
        flags=tuple(sorted((flags or {}).items())),
        optional_arguments=frozenset(f"call.{name}" for name in arguments),
    )


def inventory(**entries: VendorBuild | str | None) -> Inventory:
    """A build is loaded, None is taken as complete, a text is what a broken library says."""
    return Inventory(tuple(_entry(name, found) for name, found in entries.items()))


def _entry(name: str, found: VendorBuild | str | None) -> VendorEntry:
    if isinstance(found, str):
        return VendorEntry(
            name=name, status=VendorStatus.BROKEN, error=found, install=f"pip install {name}"
        )
    status = VendorStatus.ASSUMED if found is None else VendorStatus.LOADED
    return VendorEntry(name=name, status=status, version="1.0", build=found)


@contextmanager
def stubbed(name: str, device: DeviceFacts = H200) -> Iterator[tuple[Recorder, Subject]]:
    """Let one library alone be there, found and loaded as on a device."""
    _fa_loaded.forget()
    try:
        with stub_vendor(STUBS[name]) as recorder:
            yield (
                recorder,
                stubbed_subject(FlashAttnBackend, device, CudaPlatform().vendor_specs()),
            )
    finally:
        _fa_loaded.forget()


def layer_spec(**fields: Any) -> LayerSpec:
    sizes = {"num_kv_heads": 2, "head_size": 16, "head_size_v": 16, "block_size": 16}
    for name in sizes:
        sizes[name] = fields.get(name, sizes[name])
    cache = FullAttentionSpec(**{**sizes, "dtype": torch.bfloat16, **fields.pop("cache", {})})
    sizes.pop("block_size")
    fields.pop("block_size", None)
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
