"""Write a step's keys and values into a paged cache with one Triton launch.

Means what `attn_shared.kv_write.write_kv` means, and refuses the same calls with the same words.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from attn_shared.kv_cache import AttentionSpec
from attn_shared.kv_write import check_write
from attn_triton.launch import AlignedLaunch, Launcher, vector_width

__all__ = [
    "Scale",
    "WritePlan",
    "WriteTarget",
    "near_scale",
    "plan_write",
    "scale_facts",
    "write_kv",
]

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

Scale = float | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """A launch for all calls whose tensors differ in addresses and numbers of tokens alone."""

    launch: AlignedLaunch
    strides: tuple[int, ...]
    num_heads: int
    rows: int
    cache_dtype: torch.dtype

    def run(
        self,
        kv_cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: Scale,
        v_scale: Scale,
    ) -> None:
        """Launch it on the current stream, for as many tokens as there are slots."""
        if kv_cache.dtype is not self.cache_dtype:
            kv_cache = kv_cache.view(self.cache_dtype)
        num_rows = slot_mapping.numel() * self.num_heads
        self.launch(
            (-(-num_rows // self.rows), 1, 1),
            (key, value, kv_cache, slot_mapping),
            (near_scale(k_scale, kv_cache), near_scale(v_scale, kv_cache), num_rows, *self.strides),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTarget:
    """A cache, in what the kernel depends on.

    Attributes:
        num_heads: heads of an entry.
        block_size: tokens per block.
        sizes: elements of a head's key and of its value.
        strides: of blocks, tokens and heads, and from a key to its value, in elements.
        dtype: of the elements.
        has_inline_scales: each row of int8 has its scale beside it.
        is_quantized: elements are narrower than what is written.
        device: where the cache is.
    """

    num_heads: int
    block_size: int
    sizes: tuple[int, int]
    strides: tuple[int, ...]
    dtype: torch.dtype
    has_inline_scales: bool
    is_quantized: bool
    device: torch.device


_PLANS: dict[tuple[object, ...], WritePlan] = {}


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
        *(scale_facts(k_scale), scale_facts(v_scale)),
    )
    num_tokens = slot_mapping.numel()
    plan = _PLANS.get(facts)
    if plan is None or key_shape[0] < num_tokens or value_shape[0] < num_tokens:
        check_write(kv_cache, spec, key, value, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        plan = _remember(facts, _plan(kv_cache, spec, key, value, slot_mapping, k_scale, v_scale))
    plan.run(kv_cache, key, value, slot_mapping, k_scale, v_scale)


def scale_facts(scale: Scale) -> tuple[object, ...]:
    """Return what is checked about a scale; in device memory its contents are not looked at."""
    if not isinstance(scale, torch.Tensor):
        return scale == 1, 0 < scale < math.inf
    is_one = scale.device.type != "cpu" or bool((scale == 1).all())
    alignment = scale.data_ptr() & 15
    return is_one, scale.shape, scale.stride(), scale.dtype, scale.device, alignment


def near_scale(scale: Scale, kv_cache: torch.Tensor) -> Scale:
    """Return a scale as the kernel takes it."""
    if isinstance(scale, torch.Tensor):
        return scale.to(kv_cache.device).contiguous()
    return float(scale)


def _remember(facts: tuple[object, ...], plan: WritePlan) -> WritePlan:
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
    k_scale: Scale,
    v_scale: Scale,
) -> WritePlan:
    views = spec.split(kv_cache)
    value_offset = int(views.value.storage_offset() - views.key.storage_offset())
    target = WriteTarget(
        num_heads=spec.num_kv_heads,
        block_size=spec.block_size,
        sizes=(spec.head_size, spec.head_size_v),
        strides=(*map(int, views.key.stride()[:3]), value_offset),
        dtype=spec.dtype,
        has_inline_scales=spec.has_inline_scales,
        is_quantized=spec.is_quantized,
        device=kv_cache.device,
    )
    return plan_write(target, key, value, slot_mapping, k_scale, v_scale)


def plan_write(
    target: WriteTarget,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
) -> WritePlan:
    """Choose the widths of accesses and the constants of the kernel.

    Args:
        target: the cache.
        key: (T, heads, key size), any strides.
        value: (T, heads, value size), any strides.
        slot_mapping: (T,) int64.
        k_scale: of an fp8 cache's keys.
        v_scale: likewise of its values.
    """
    cache_vector = vector_width(target.dtype, target.strides)
    # int8 entries start at multiples of 4 bytes: to read wider would move elements between threads.
    most = cache_vector if target.has_inline_scales else _WIDEST
    key_step, key_vector, key_strides = _row_access(key, most)
    value_step, value_vector, value_strides = _row_access(value, most)
    key_width, value_width = map(_power_of_two, target.sizes)
    elements = _QUANTIZED_TILE_ELEMENTS if target.is_quantized else _TILE_ELEMENTS
    rows = max(1, elements // max(key_width, value_width))
    constants = {
        "HEADS": target.num_heads,
        "BLOCK_SIZE": target.block_size,
        "ROWS": rows,
        "KEY_SIZE": target.sizes[0],
        "KEY_WIDTH": key_width,
        "KEY_STEP": key_step,
        "KEY_VECTOR": key_vector,
        "VALUE_SIZE": target.sizes[1],
        "VALUE_WIDTH": value_width,
        "VALUE_STEP": value_step,
        "VALUE_VECTOR": value_vector,
        "CACHE_VECTOR": cache_vector,
        "STORED": _INT8 if target.has_inline_scales else _FP8_CODES.get(target.dtype, _PLAIN),
        "K_SCALE": _scale_kind(k_scale),
        "V_SCALE": _scale_kind(v_scale),
    }
    return WritePlan(
        launch=AlignedLaunch(_launcher(tuple(constants.items()))),
        strides=(
            *slot_mapping.stride(),
            *key_strides,
            *value_strides,
            *(stride // cache_vector for stride in target.strides),
        ),
        num_heads=target.num_heads,
        rows=rows,
        cache_dtype=_kernel_dtype(target.dtype, target.device),
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


def _scale_kind(scale: Scale) -> int:
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
