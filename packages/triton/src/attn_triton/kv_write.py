"""Write a step's keys and values into a paged cache with one Triton launch.

Means what `attn_shared.kv_write.write_kv` means, and refuses the same calls with the same words.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from attn_shared.dtypes import KVQuantMode
from attn_shared.kv_cache import AttentionSpec
from attn_shared.kv_write import check_write
from attn_triton.launch import AlignedLaunch, Launcher, vector_width

__all__ = ["write_kv"]

_FP8_CODES = {torch.float8_e4m3fn: 1, torch.float8_e4m3fnuz: 2, torch.float8_e5m2: 3}
_PLAIN, _INT8 = 0, 4
_NUMBER, _ONE_ELEMENT, _PER_HEAD = 0, 1, 2
_WITH_INSTRUCTIONS = (torch.float8_e4m3fn, torch.float8_e5m2)  # on NVIDIA GPUs, from here on:
_FP8_CAPABILITY = (8, 9)
# Elements of keys in a program, and as many of values. On an H200 the smaller tile writes 256
# tokens 20% quicker into int8 and fp8, 8192 tokens 12% quicker into int8; bf16 gains nothing by it.
_TILE_ELEMENTS = 2048
_QUANTIZED_TILE_ELEMENTS = 1024
_WIDEST = 16
_MOST_PLANS = 1024

_Scale = float | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A launch for all calls whose tensors differ in addresses and numbers of tokens alone."""

    launch: AlignedLaunch
    strides: tuple[int, ...]
    num_heads: int
    rows: int
    cache_dtype: torch.dtype


_PLANS: dict[tuple[object, ...], _Plan] = {}


def write_kv(
    kv_cache: torch.Tensor,
    spec: AttentionSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
) -> None:
    """Write the step's keys and values into their slots, on the current stream.

    The first call with tensors of new strides or dtypes compiles, and cannot be captured in a
    graph. Where two tokens have one slot, either may be what is kept.

    Args:
        kv_cache: a cache of `spec`; any strides that `spec.split` takes.
        spec: the cache's format.
        key: (T, Hkv, D), any strides.
        value: (T, Hkv, Dv), any strides.
        slot_mapping: (T,) int64; -1 is not written. Rows of key and value past its length are
            ignored.
        k_scale: stored = key / k_scale for an fp8 cache; a number, or (Hkv,) float32 on the cache's
            device. 1 for every other cache.
        v_scale: likewise for values.

    Raises:
        InvalidInputError: a shape, dtype, device or scale does not fit.
        UnsupportedOptionError: a format that has no one way of being written.
    """
    key_shape, value_shape = key.shape, value.shape
    facts = (
        *(spec, kv_cache.shape, kv_cache.stride(), kv_cache.device),
        kv_cache.storage_offset() & 3,  # scales beside entries need a multiple of 4
        *(key_shape[1:], key.stride(), key.dtype, key.device),
        *(value_shape[1:], value.stride(), value.dtype, value.device),
        *(slot_mapping.dtype, slot_mapping.stride(), slot_mapping.device),
        *(_scale_facts(k_scale), _scale_facts(v_scale)),
    )
    num_tokens = slot_mapping.numel()
    plan = _PLANS.get(facts)
    if plan is None or key_shape[0] < num_tokens or value_shape[0] < num_tokens:
        check_write(kv_cache, spec, key, value, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        plan = _remember(facts, _plan(kv_cache, spec, key, value, slot_mapping, k_scale, v_scale))
    if kv_cache.dtype is not plan.cache_dtype:
        kv_cache = kv_cache.view(plan.cache_dtype)
    num_rows = num_tokens * plan.num_heads
    plan.launch(
        (-(-num_rows // plan.rows), 1, 1),
        (key, value, kv_cache, slot_mapping),
        (_near(k_scale, kv_cache), _near(v_scale, kv_cache), num_rows, *plan.strides),
    )


def _scale_facts(scale: _Scale) -> tuple[object, ...]:
    """Return what is checked about a scale; in device memory its contents are not looked at."""
    if not isinstance(scale, torch.Tensor):
        return scale == 1, 0 < scale < math.inf
    is_one = scale.device.type != "cpu" or bool((scale == 1).all())
    alignment = scale.data_ptr() & 15
    return is_one, scale.shape, scale.stride(), scale.dtype, scale.device, alignment


def _near(scale: _Scale, kv_cache: torch.Tensor) -> _Scale:
    """Return a scale as the kernel takes it."""
    if isinstance(scale, torch.Tensor):
        return scale.to(kv_cache.device).contiguous()
    return float(scale)


def _remember(facts: tuple[object, ...], plan: _Plan) -> _Plan:
    if len(_PLANS) >= _MOST_PLANS:
        _PLANS.clear()
    _PLANS[facts] = plan
    return plan


def _plan(
    kv_cache: torch.Tensor,
    spec: AttentionSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: _Scale,
    v_scale: _Scale,
) -> _Plan:
    """Choose the widths of accesses and the constants of the kernel."""
    views = spec.split(kv_cache)
    value_offset = int(views.value.storage_offset() - views.key.storage_offset())
    cache_strides = (*map(int, views.key.stride()[:3]), value_offset)
    cache_vector = vector_width(spec.dtype, cache_strides)
    # int8 entries start at multiples of 4 bytes: to read wider would move elements between threads.
    most = cache_vector if spec.has_inline_scales else _WIDEST
    key_step, key_vector, key_strides = _row_access(key, most)
    value_step, value_vector, value_strides = _row_access(value, most)
    key_width, value_width = _power_of_two(spec.head_size), _power_of_two(spec.head_size_v)
    elements = _QUANTIZED_TILE_ELEMENTS if spec.is_quantized else _TILE_ELEMENTS
    rows = max(1, elements // max(key_width, value_width))
    constants = {
        "HEADS": spec.num_kv_heads,
        "BLOCK_SIZE": spec.block_size,
        "ROWS": rows,
        "KEY_SIZE": spec.head_size,
        "KEY_WIDTH": key_width,
        "KEY_STEP": key_step,
        "KEY_VECTOR": key_vector,
        "VALUE_SIZE": spec.head_size_v,
        "VALUE_WIDTH": value_width,
        "VALUE_STEP": value_step,
        "VALUE_VECTOR": value_vector,
        "CACHE_VECTOR": cache_vector,
        "STORED": _stored(spec),
        "K_SCALE": _scale_kind(k_scale),
        "V_SCALE": _scale_kind(v_scale),
    }
    return _Plan(
        launch=AlignedLaunch(_launcher(tuple(constants.items()))),
        strides=(
            *slot_mapping.stride(),
            *key_strides,
            *value_strides,
            *(stride // cache_vector for stride in cache_strides),
        ),
        num_heads=spec.num_kv_heads,
        rows=rows,
        cache_dtype=_kernel_dtype(spec.dtype, kv_cache.device),
    )


def _row_access(rows: torch.Tensor, most: int) -> tuple[int, int, tuple[int, ...]]:
    """Return the step inside a row, the width of an access, and the strides in units of it."""
    *strides, step = map(int, rows.stride())
    if rows.shape[2] == 1:
        step = 1
    vector = min(most, vector_width(rows.dtype, strides)) if step == 1 else 1
    return step, vector, tuple(stride // vector for stride in strides)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _stored(spec: AttentionSpec) -> int:
    if spec.quant_mode is KVQuantMode.INT8_PER_TOKEN_HEAD:
        return _INT8
    return _FP8_CODES.get(spec.dtype, _PLAIN)


def _scale_kind(scale: _Scale) -> int:
    if not isinstance(scale, torch.Tensor):
        return _NUMBER
    return _ONE_ELEMENT if scale.numel() == 1 else _PER_HEAD


def _kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return what the kernel takes a cache's elements for: fp8 as codes without instructions."""
    if dtype not in _FP8_CODES or (dtype in _WITH_INSTRUCTIONS and _casts_to_fp8(device)):
        return dtype
    return torch.uint8


@functools.cache
def _casts_to_fp8(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


@functools.cache
def _launcher(constants: tuple[tuple[str, int], ...]) -> Launcher:
    from attn_triton.kernels.kv_write import write_kv as kernel

    return Launcher(kernel, dict(constants))
