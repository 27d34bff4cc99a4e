"""What the tests of Intel's backends share: requests, layers, batches, loaded stubs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from attn_conformance.outcome import Status
from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.suite import run_rules, stubbed_subject
from attn_conformance.subject import Subject
from attn_shared.backend import AttentionBackend
from attn_shared.device import DeviceFacts, preset
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest
from attn_shared.spec import LayerSpec
from attn_xpu.platform import XpuPlatform

__all__ = [
    "B60",
    "common_of",
    "failed_of",
    "layer_object",
    "layer_spec",
    "request",
    "stubbed",
]

B60 = preset("b60")


def request(**fields: Any) -> AttentionRequest:
    return AttentionRequest(
        **{"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 64, **fields}
    )


@contextmanager
def stubbed(
    stub: VendorStub, backend: type[AttentionBackend], device: DeviceFacts = B60
) -> Iterator[tuple[Recorder, Subject]]:
    """Let one release be there, found and loaded as on a device."""
    with stub_vendor(stub) as recorder:
        yield recorder, stubbed_subject(backend, device, XpuPlatform().vendor_specs())


def failed_of(subject: Subject, rules: tuple[str, ...] = ()) -> tuple[dict[str, str], int]:
    """Return what failed, and how many cases passed."""
    outcomes = list(run_rules(subject, rules))
    passed = sum(outcome.status is Status.PASSED for outcome in outcomes)
    failed = {
        f"{item.rule}[{item.name}]": item.message
        for item in outcomes
        if item.status is Status.FAILED
    }
    return failed, passed


def layer_spec(**fields: Any) -> LayerSpec:
    sizes = {"num_kv_heads": 2, "head_size": 16, "head_size_v": 16, "block_size": 16}
    for name in sizes:
        sizes[name] = fields.pop(name, sizes[name])
    dtype = fields.pop("dtype", torch.bfloat16)
    cache = FullAttentionSpec(**{**sizes, "dtype": dtype, **fields.pop("cache", {})})
    sizes.pop("block_size")
    plain = {"num_heads": 4, "scale": 0.25, "dtype": dtype, "kv_cache_spec": cache}
    return LayerSpec(**{**sizes, **plain, **fields})


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
