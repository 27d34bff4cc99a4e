"""What flex_attention serves, as the selector asks it and as constructors hold a layer to it."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

from attn_shared.capability import Capability, Reason, Rule, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import KVCacheLayout
from attn_shared.limits import DeviceLimit, MultipleOf, SizeSet
from attn_shared.request import AttentionRequest, AttentionType

__all__ = ["NAME", "capability_of", "flex_capability"]

NAME = "FLEX_ATTENTION"

# NVIDIA was run on an H200. The rest is what torch's source says, not run: its Triton template has
# configurations for every AMD and Intel GPU that Triton compiles for, and Intel's passes
# flex_attention's own check of devices from torch 2.9 on. Below 8.0 Triton has no bfloat16.
_NVIDIA = DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0))
_AMD = DeviceLimit(vendor=Vendor.AMD)
_INTEL = DeviceLimit(vendor=Vendor.INTEL)
_CPU = DeviceLimit(vendor=Vendor.CPU)
_FIRST_TORCH_FOR_INTEL = "2.9"

# A CPU takes every width. Triton's dot takes no less than 16, and from 513 on the smallest tile
# of queries, keys and values outgrows the shared memory of most GPUs.
_CPU_WIDTHS = SizeSet()
_GPU_WIDTHS = SizeSet(minimum=16, maximum=512)

_PREFERRED_BLOCK = 64  # what a Triton tile of keys holds for heads of 128 16-bit elements


def flex_capability(vendor: Vendor) -> Capability:
    """Return what is served on the devices of a vendor.

    On a CPU everything is SLOW: by default the operator runs uncompiled there.
    """
    is_cpu = vendor is Vendor.CPU
    served = Support.SLOW if is_cpu else Support.YES
    widths = _CPU_WIDTHS if is_cpu else _GPU_WIDTHS
    has_intel = TorchVersion(torch.__version__) >= _FIRST_TORCH_FOR_INTEL
    return Capability(
        devices=(_CPU, _NVIDIA, _AMD, *((_INTEL,) if has_intel else ())),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        head_sizes=widths,
        head_sizes_v=widths,
        kv_cache_dtypes=frozenset({"auto", "float16", "bfloat16", "float32"}),
        block_sizes=(MultipleOf(1),),
        preferred_block_size=_PREFERRED_BLOCK,
        attn_types=frozenset(AttentionType),
        kv_layouts=(KVCacheLayout.NHD, KVCacheLayout.HND),
        sinks=served,
        window=served,
        two_sided_window=served,
        chunked_local=served,
        softcap=served,
        alibi=served,
        non_causal=served,
        per_request_causal=served,
        mm_prefix=served,
        kv_connector=Support.YES,  # the cache is plain, whatever reads it
        lse=served,
        needs_exact_host_lengths=True,
        rules=(Rule(name="chunks_are_causal", check=_chunks_are_causal),),
    )


def _chunks_are_causal(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    if request.chunk_size is None or request.is_causal:
        return None
    return Reason(
        code="chunks_are_causal",
        value=str(request.chunk_size),
        allowed="None where rows are not causal",
        hint="a chunk is seen up to the query itself",
    )


def capability_of(device: torch.device | None = None) -> Capability:
    """Return what is served of a layer on a device; None, as in a constructor: on a CPU.

    Of the vendors of GPUs any will do: what they serve of a layer is the same.
    """
    is_cpu = device is None or device.type == "cpu"
    return flex_capability(Vendor.CPU if is_cpu else Vendor.NVIDIA)
