"""Reshape-and-cache: the step's keys and values into their slots, quantised on the way."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.variants import KernelVariant

__all__ = ["variants", "write_kv"]

_PLAIN = tl.constexpr(0)  # values of STORED
_E4M3FN = tl.constexpr(1)
_E4M3FNUZ = tl.constexpr(2)
_E5M2 = tl.constexpr(3)
_INT8 = tl.constexpr(4)
_NUMBER = tl.constexpr(0)  # values of K_SCALE and V_SCALE
_ONE_ELEMENT = tl.constexpr(1)
_INT8_MAX = tl.constexpr(127.0)
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no bits for a fraction


@triton.jit
def largest_bits(STORED: tl.constexpr):
    """Return the float32 pattern of the largest finite value: 448, 240 or 57344."""
    if STORED == _E5M2:
        return 0x47600000
    elif STORED == _E4M3FNUZ:
        return 0x43700000
    else:
        return 0x43E00000


@triton.jit
def fp8_codes(x, STORED: tl.constexpr):
    """Return the codes of float32 `x` in an 8-bit format, to nearest even and saturating.

    In integer arithmetic, so that it is the same on GPUs that have no such format.
    """
    MANTISSA: tl.constexpr = 2 if STORED == _E5M2 else 3
    BIAS: tl.constexpr = 15 if STORED == _E5M2 else 8 if STORED == _E4M3FNUZ else 7
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = tl.minimum(bits & 0x7FFFFFFF, largest_bits(STORED))
    odd = (magnitude >> DROPPED) & 1
    rounded = (magnitude + ((1 << (DROPPED - 1)) - 1) + odd) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal value the codes count multiples of the smallest one: added to a
    # number whose last bit is worth that much, `x` is rounded to it.
    UNIT: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    unit = tl.full(x.shape, UNIT, tl.int32).to(tl.float32, bitcast=True)
    shifted = magnitude.to(tl.float32, bitcast=True) + unit
    subnormal = shifted.to(tl.int32, bitcast=True) - UNIT
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    sign = (bits >> 24) & 0x80
    if STORED == _E4M3FNUZ:  # the pattern of a negative zero is its NaN
        code = tl.where(is_nan, 0x80, tl.where(code == 0, 0, code | sign))
    else:
        code = tl.where(is_nan, 0x7F, code) | sign
    return code.to(tl.uint8)


@triton.jit
def scale_of(scale, heads, KIND: tl.constexpr):
    """Return the scale of each row [ROWS]: a number, a tensor of one element, or one per head."""
    if KIND == _NUMBER:
        return tl.zeros(heads.shape, tl.float32) + scale
    elif KIND == _ONE_ELEMENT:
        return tl.zeros(heads.shape, tl.float32) + tl.load(scale).to(tl.float32)
    else:
        return tl.load(scale + heads).to(tl.float32)


@triton.jit
def load_rows(sources, is_row, SIZE: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Return the rows [ROWS, WIDTH] of SIZE elements at pointers `sources` [ROWS]."""
    columns = tl.arange(0, WIDTH)[None, :]
    inside = is_row[:, None] & (columns < SIZE)
    return tl.load(sources[:, None] + columns * STEP, mask=inside, other=0.0)


@triton.jit
def store_rows(x, places, is_kept, scales, SIZE: tl.constexpr, STORED: tl.constexpr):
    """Write rows `x` [ROWS, WIDTH] to pointers `places` [ROWS] in the cache's format."""
    columns = tl.arange(0, x.shape[1])[None, :]
    mask = is_kept[:, None] & (columns < SIZE)
    targets = places[:, None] + columns
    element: tl.constexpr = places.dtype.scalar.element_ty
    if STORED == _PLAIN:
        if x.dtype != element:
            x = x.to(tl.float32).to(element)
        tl.store(targets, x, mask=mask)
    elif STORED == _INT8:
        x = x.to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full(scales.shape, _INT8_MAX, tl.float32))
        divisor = tl.where(scale > 0, scale, 1.0)
        quotient = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
        rounded = (quotient + _ROUNDING) - _ROUNDING
        code = tl.clamp(rounded, -_INT8_MAX, _INT8_MAX).to(tl.int8)
        tl.store(targets, code, mask=mask)
        BESIDE: tl.constexpr = (SIZE + 3) // 4 * 4
        tl.store((places + BESIDE).to(tl.pointer_type(tl.float32)), scale, mask=is_kept)
    else:
        quotient = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scales[:, None], x.shape))
        if element == tl.uint8:
            tl.store(targets, fp8_codes(quotient, STORED), mask=mask)
        else:
            limit = tl.full((), largest_bits(STORED), tl.int32).to(tl.float32, bitcast=True)
            kept = tl.clamp(quotient, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
            tl.store(targets, kept.to(element), mask=mask)


@triton.jit
def write_kv(
    key,
    value,
    cache,
    slots,
    k_scale,
    v_scale,
    num_rows: tl.int32,
    slot_step: tl.int64,
    key_token: tl.int64,
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    cache_block: tl.int64,
    cache_token: tl.int64,
    cache_head: tl.int64,
    value_offset: tl.int64,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_STEP: tl.constexpr,
    KEY_VECTOR: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    VALUE_VECTOR: tl.constexpr,
    CACHE_VECTOR: tl.constexpr,
    STORED: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
):
    """Write ROWS pairs of a token and a head per program, keys then values.

    Strides and `value_offset` (elements from a key to its value) come in units of the vectors,
    which is how the compiler knows that accesses may be that wide. Every offset is 64 bits wide.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    tokens = (rows // HEADS).to(tl.int64)
    heads = rows % HEADS
    # All loads before the first store, and none that waits for a slot: one trip to memory, not
    # three. A row that is not kept is read for nothing.
    slot = tl.load(slots + tokens * slot_step, mask=is_row, other=-1)
    key_at = (tokens * key_token + heads * key_head) * KEY_VECTOR
    keys = load_rows(key + key_at, is_row, KEY_SIZE, KEY_WIDTH, KEY_STEP)
    value_at = (tokens * value_token + heads * value_head) * VALUE_VECTOR
    values = load_rows(value + value_at, is_row, VALUE_SIZE, VALUE_WIDTH, VALUE_STEP)
    key_scales = scale_of(k_scale, heads, K_SCALE)
    value_scales = scale_of(v_scale, heads, V_SCALE)
    is_kept = slot >= 0
    blocks = slot // BLOCK_SIZE
    offsets = blocks * cache_block + (slot - blocks * BLOCK_SIZE) * cache_token + heads * cache_head
    places = cache + offsets * CACHE_VECTOR
    store_rows(keys, places, is_kept, key_scales, KEY_SIZE, STORED)
    places = cache + (offsets + value_offset) * CACHE_VECTOR
    store_rows(values, places, is_kept, value_scales, VALUE_SIZE, STORED)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how caches are written on this architecture, 8 heads of 128 and some that differ."""
    has_fp8 = arch in ("sm_90", "sm_100", "sm_120")
    yield _variant("bf16", "*bf16", "*bf16", 0, 128, 128)
    yield _variant("bf16-d96-d64", "*bf16", "*bf16", 0, 96, 64, is_main=False)
    yield _variant("float32", "*fp32", "*fp32", 0, 128, 128, is_main=False)
    yield _variant("e4m3", "*bf16", "*fp8e4nv" if has_fp8 else "*u8", 1, 128, 128)
    yield _variant("e5m2", "*bf16", "*fp8e5" if has_fp8 else "*u8", 3, 128, 128, is_main=False)
    yield _variant("e4m3fnuz", "*bf16", "*u8", 2, 128, 128, is_main=arch == "gfx942")
    yield _variant("int8", "*bf16", "*i8", 4, 128, 128)


def _variant(
    name: str,
    rows: str,
    cache: str,
    stored: int,
    key_size: int,
    value_size: int,
    *,
    is_main: bool = True,
) -> KernelVariant:
    strides = ["slot_step", "key_token", "key_head", "value_token", "value_head"]
    strides += ["cache_block", "cache_token", "cache_head", "value_offset"]
    scale = "*fp32" if stored not in (0, 4) else "fp32"
    vector = 4 if stored == 4 or rows == "*fp32" else 8
    return KernelVariant(
        name=f"kv-write-{name}",
        kernel=write_kv,
        signature={
            "key": rows,
            "value": rows,
            "cache": cache,
            "slots": "*i64",
            "k_scale": scale,
            "v_scale": scale,
            "num_rows": "i32",
            **dict.fromkeys(strides, "i64"),
        },
        constants={
            "HEADS": 8,
            "BLOCK_SIZE": 16,
            "ROWS": 8 if stored else 16,
            "KEY_SIZE": key_size,
            "KEY_WIDTH": 128,
            "KEY_STEP": 1,
            "KEY_VECTOR": vector,
            "VALUE_SIZE": value_size,
            "VALUE_WIDTH": 128,
            "VALUE_STEP": 1,
            "VALUE_VECTOR": vector,
            "CACHE_VECTOR": {0: vector, 4: 4}.get(stored, 16),
            "STORED": stored,
            "K_SCALE": 2 if scale == "*fp32" else 0,
            "V_SCALE": 2 if scale == "*fp32" else 0,
        },
        is_main=is_main,
    )
