"""Limits of backends that attn knows by name and may not provide, as vLLM 0.25.1 publishes them.

They answer what such a backend would say to a request, and are a statement about that release: a
backend that attn provides answers for itself. Where a limit depends on the device, the record is of
the device that is asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from attn_shared.capability import Capability, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.limits import DeviceLimit, MultipleOf, SizeSet
from attn_shared.request import AttentionType

__all__ = ["SOURCE", "published_limits"]

SOURCE = "vLLM 0.25.1"

_SIXTEEN = frozenset({torch.float16, torch.bfloat16})
_THREE = frozenset({*_SIXTEEN, torch.float32})
_BFLOAT16 = frozenset({torch.bfloat16})

_PLAIN = frozenset({"auto", "float16", "bfloat16"})
_E4M3 = frozenset({*_PLAIN, "fp8", "fp8_e4m3"})
_FP8 = frozenset({*_E4M3, "fp8_e5m2"})
_PACKED = frozenset({"auto", "fp8", "fp8_e4m3", "fp8_ds_mla"})
_TURBOQUANT = frozenset({f"turboquant_{k}" for k in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")})

_ANY = SizeSet()
_LATENTS = SizeSet.of(320, 576)
_DEEPSEEK = SizeSet.of(576)
_V4 = SizeSet.of(512)

_EVERY_TYPE = frozenset(AttentionType)
_NO_CROSS = _EVERY_TYPE - {AttentionType.ENCODER_DECODER}

_AMD = (DeviceLimit(vendor=Vendor.AMD),)
_AITER = (DeviceLimit(vendor=Vendor.AMD, archs=("gfx942", "gfx950")),)
_INTEL = (DeviceLimit(vendor=Vendor.INTEL),)


def _nvidia(*families: int) -> tuple[DeviceLimit, ...]:
    return (DeviceLimit(vendor=Vendor.NVIDIA, families=families or None),)


def _from(major: int, minor: int = 0) -> tuple[DeviceLimit, ...]:
    return (DeviceLimit(vendor=Vendor.NVIDIA, at_least=(major, minor)),)


_TRITON = (*_nvidia(), *_AMD, *_INTEL)


def _limits(
    devices: tuple[DeviceLimit, ...],
    head_sizes: SizeSet,
    block_sizes: tuple[int | MultipleOf, ...],
    *served: str,
    **more: Any,
) -> Capability:
    """Return a record; `served` are the features it has besides the connector of caches."""
    features = dict.fromkeys(("kv_connector", *served), Support.YES)
    plain: dict[str, Any] = {"dtypes": _SIXTEEN, "kv_cache_dtypes": _PLAIN}
    return Capability(
        devices=devices,
        head_sizes=head_sizes,
        block_sizes=block_sizes,
        **{**plain, **features, **more},
    )


def _mla(
    devices: tuple[DeviceLimit, ...],
    head_sizes: SizeSet,
    block_sizes: tuple[int | MultipleOf, ...],
    *served: str,
    **more: Any,
) -> Capability:
    return _limits(devices, head_sizes, block_sizes, *served, is_mla=True, **more)


def _sparse(
    devices: tuple[DeviceLimit, ...],
    head_sizes: SizeSet,
    block_sizes: tuple[int | MultipleOf, ...],
    *served: str,
    **more: Any,
) -> Capability:
    return _mla(devices, head_sizes, block_sizes, *served, is_sparse=True, **more)


_X16, _X1 = (MultipleOf(16),), (MultipleOf(1),)
_LOGITS = ("window", "softcap")

_FIXED = MappingProxyType(
    {
        "TRITON_ATTN_DIFFKV": _limits(
            (*_nvidia(), *_AMD),
            SizeSet(minimum=32),
            _X16,
            *("sinks", "alibi", "non_causal", "mm_prefix", "batch_invariant", *_LOGITS),
            dtypes=_THREE,
            kv_cache_dtypes=frozenset({"auto", "bfloat16"}),
            head_sizes_v=SizeSet(minimum=32),
        ),
        "ROCM_ATTN": _limits(
            _AMD,
            SizeSet.of(32, 64, 80, 96, 128, 160, 192, 224, 256),
            _X16,
            *("alibi", "non_causal", "mm_prefix", *_LOGITS),
            dtypes=_THREE,
            kv_cache_dtypes=_FP8,
            attn_types=_NO_CROSS,
            kv_connector=Support.NO,
        ),
        "ROCM_AITER_FA": _limits(
            _AITER,
            SizeSet.of(64, 128, 256),
            (16, 32),
            *("sinks", "alibi", "non_causal", *_LOGITS),
            kv_cache_dtypes=_FP8,
        ),
        "ROCM_AITER_UNIFIED_ATTN": _limits(
            _AMD,
            SizeSet(minimum=32),
            _X16,
            *("sinks", "alibi", "mm_prefix", *_LOGITS),
            dtypes=_BFLOAT16,
            kv_cache_dtypes=frozenset({"auto", "bfloat16", "fp8", "fp8_e4m3"}),
            attn_types=_EVERY_TYPE,
            kv_connector=Support.NO,
        ),
        "HPC_ATTN": _limits(
            _from(9),
            SizeSet.of(128),
            (64,),
            "window",
            kv_cache_dtypes=frozenset({"auto", "bfloat16", "fp8_e4m3"}),
        ),
        "TURBOQUANT": _limits(_TRITON, _ANY, (16, 32, 64, 128), kv_cache_dtypes=_TURBOQUANT),
        "MINIMAX_M3_SPARSE": _limits(
            (*_nvidia(), *_AMD),
            SizeSet.of(128),
            (128,),
            kv_cache_dtypes=_FP8 - {"auto", "float16"},
            is_sparse=True,
        ),
        "TRITON_MLA": _mla(_TRITON, _ANY, _X16, "batch_invariant", kv_cache_dtypes=_E4M3),
        "FLASHMLA": _mla(_nvidia(9), _LATENTS, (64,), kv_cache_dtypes=_E4M3),
        "FLASHINFER_MLA": _mla(_nvidia(10), _LATENTS, (32, 64), kv_cache_dtypes=_E4M3),
        "FLASH_ATTN_MLA": _mla(_nvidia(9), _LATENTS, _X16, "batch_invariant"),
        "CUTLASS_MLA": _mla(_nvidia(10), _LATENTS, (128,), kv_cache_dtypes=_E4M3),
        "TOKENSPEED_MLA": _mla(_nvidia(10), _LATENTS, (32, 64), kv_cache_dtypes=_E4M3 - _PLAIN),
        "ROCM_AITER_MLA": _mla(_AITER, _ANY, _X1, kv_cache_dtypes=_FP8),
        "ROCM_AITER_TRITON_MLA": _mla(_AITER, _ANY, _X1, kv_cache_dtypes=_FP8),
        "ROCM_AITER_MLA_SPARSE": _sparse(_AITER, _ANY, (1, 64), kv_cache_dtypes=_E4M3),
        "XPU_MLA_SPARSE": _sparse(_INTEL, _DEEPSEEK, _X1),
        "FLASHINFER_MLA_SPARSE": _sparse(_nvidia(10), _DEEPSEEK, (32, 64), kv_cache_dtypes=_E4M3),
        "FLASHINFER_MLA_SPARSE_SM120": _sparse(
            _nvidia(12), _DEEPSEEK, (64, 256), dtypes=_BFLOAT16, kv_cache_dtypes=_PACKED
        ),
        "FLASHINFER_MLA_SPARSE_DSV4": _sparse(
            _nvidia(10, 12),
            _V4,
            (256,),
            "sinks",
            dtypes=_BFLOAT16,
            kv_cache_dtypes=_PACKED | {"bfloat16"},
        ),
        "FLASHMLA_SPARSE": _sparse(
            _nvidia(9, 10),
            _DEEPSEEK,
            (64,),
            dtypes=_BFLOAT16,
            kv_cache_dtypes=frozenset({"auto", "bfloat16", "fp8", "fp8_ds_mla"}),
        ),
        "FLASHMLA_SPARSE_DSV4": _sparse(
            _nvidia(9, 10),
            _V4,
            (256,),
            "sinks",
            dtypes=_BFLOAT16,
            kv_cache_dtypes=_PACKED - {"fp8_e4m3"},
        ),
        "ROCM_FLASHMLA_SPARSE_DSV4": _sparse(
            _AMD, _V4, (256,), "sinks", dtypes=_BFLOAT16, kv_cache_dtypes=_PACKED - {"fp8_e4m3"}
        ),
        "FLASH_ATTN_MLA_SPARSE": _sparse(_nvidia(9), _ANY, (64,)),
    }
)


def _flashinfer(device: DeviceFacts) -> Capability:
    """Its trtllm-gen kernels, of family 10.x, add sinks and a 4-bit cache."""
    has_trtllm_gen = device.capability is not None and device.capability.is_family(10)
    return _limits(
        (DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0), below=(12, 2)),),
        SizeSet.of(64, 128, 256, 512),
        (16, 32, 64),
        *("non_causal", *_LOGITS, *(("sinks",) if has_trtllm_gen else ())),
        kv_cache_dtypes=_FP8 | {"nvfp4"} if has_trtllm_gen else _FP8,
    )


def _flash_attn_diffkv(device: DeviceFacts) -> Capability:
    """Its third and fourth generations, of families 9.x to 11.x, have sinks and wider heads."""
    capability = device.capability
    is_hopper = capability is not None and capability.is_family(9)
    is_newer = capability is not None and any(map(capability.is_family, (9, 10, 11)))
    widest = 512 if is_newer else 256
    sizes = SizeSet(minimum=8, maximum=widest, multiple_of=8)
    return _limits(
        _from(8),
        sizes,
        _X16,
        *("non_causal", "batch_invariant", *_LOGITS, *(("sinks",) if is_newer else ())),
        kv_cache_dtypes=_E4M3 if is_hopper else _PLAIN,
        attn_types=_EVERY_TYPE,
        head_sizes_v=sizes,
    )


_BY_DEVICE: MappingProxyType[str, Callable[[DeviceFacts], Capability]] = MappingProxyType(
    {"FLASHINFER": _flashinfer, "FLASH_ATTN_DIFFKV": _flash_attn_diffkv}
)


def published_limits(name: str, device: DeviceFacts) -> Capability | None:
    """Return what `SOURCE` says that a backend can do on a device; None where it says nothing."""
    depends = _BY_DEVICE.get(name)
    return _FIXED.get(name) if depends is None else depends(device)
