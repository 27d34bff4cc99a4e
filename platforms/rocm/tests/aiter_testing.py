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
from attn_conformance.stubs.vendors.aiter_mla import AITER_MLA_0_1_7, AITER_MLA_HEAD
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
from attn_shared.spec import BuildConfig, LayerSpec

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
    "run",
    "stubbed",
]

MI300X = preset("mi300x")
MI355X = preset("mi355x")

WHEEL = "wheel"
HEAD = "head"

STUBS: dict[str, VendorStub] = {WHEEL: AITER_MLA_0_1_7, HEAD: AITER_MLA_HEAD}


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


def run(
    release: str,
    spec: LayerSpec,
    *,
    backend: type[AttentionBackend] = AiterFlashBackend,
    device: DeviceFacts = MI300X,
    layer: dict[str, Any] | None = None,
    with_lse: bool = False,
    query_lens: tuple[int, ...] = (1, 3),
    seq_lens: tuple[int, ...] = (20, 33),
    **batch: Any,
) -> Recorder:
    """Run one step of a layer, and return what was called."""
    with stubbed(release, backend, device) as (recorder, _):
        cache_spec = spec.kv_cache_spec
        size = 16 if cache_spec is None else cache_spec.block_size
        common = common_of(list(query_lens), list(seq_lens), size, **batch)
        if cache_spec is None:
            common = common.with_fields(block_table=None, causal=False)
        builder = backend.get_builder_cls()(
            cache_spec, {"layer": spec}, BuildConfig(), torch.device("cpu")
        )
        count = common.num_actual_tokens
        query = torch.randn(count, spec.num_heads, spec.head_size).to(spec.dtype)
        key = value = query[:, : spec.num_kv_heads].contiguous()
        cache = None
        if cache_spec is not None:
            table = common.block_table
            assert table is not None
            cache = cache_spec.allocate(table.numel(), "cpu")  # type: ignore[attr-defined]
        impl: Any = backend.get_impl_cls()
        impl(spec).forward(
            layer_object(**(layer or {})),
            query,
            key,
            value,
            cache,
            builder.build(0, common),
            torch.empty_like(query),
            lse=torch.empty(spec.num_heads, count) if with_lse else None,
        )
        return recorder
