"""Writing and reading paged caches: every byte against an addressing rule worked out by hand."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_shared import kv_write
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, FullAttentionSpec, MLAAttentionSpec
from attn_shared.kv_write import (
    PAD_SLOT_ID,
    check_write,
    concat_and_cache_mla,
    gather_rows,
    slot_mapping_for,
    token_positions,
    write_kv,
)

FN, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2

FORMATS = [
    ("auto", torch.float16),
    ("auto", torch.bfloat16),
    ("float32", torch.float32),
    ("fp8", FN),
    ("fp8_e4m3", FNUZ),
    ("fp8_e5m2", E5M2),
    ("int8_per_token_head", torch.int8),
]

POISON = 0x55  # a byte that no written value below has


def spec(**options: Any) -> FullAttentionSpec:
    plain: dict[str, Any] = {
        "block_size": 4,
        "num_kv_heads": 2,
        "head_size": 3,
        "head_size_v": 3,
        "dtype": torch.float32,
    }
    return FullAttentionSpec(**{**plain, **options})


def raw(cache: Tensor) -> bytearray:
    """Return all bytes of the cache's memory, padding included."""
    return bytearray(cache.untyped_storage().tolist())


def poisoned(found: AttentionSpec | MLAAttentionSpec, num_blocks: int) -> Tensor:
    """Return a cache whose every byte, padding included, is POISON."""
    cache = found.allocate(num_blocks, "cpu")
    torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage()).fill_(POISON)
    return cache


@dataclass(frozen=True)
class Address:
    """Where an entry lies, in bytes, by the description of the format."""

    spec: AttentionSpec

    def entry_bytes(self, width: int) -> int:
        if self.spec.kv_cache_dtype != "int8_per_token_head":
            return width * self.spec.dtype.itemsize
        return (width + 3) // 4 * 4 + 4

    def of(self, side: int, block: int, token: int, head: int) -> int:
        """Byte of the first element of K (side 0) or V (side 1)."""
        spec = self.spec
        key, value = self.entry_bytes(spec.head_size), self.entry_bytes(spec.head_size_v)
        nhd, hnd = token * spec.num_kv_heads + head, head * spec.block_size + token
        within = nhd if spec.layout == "NHD" else hnd
        per_side = spec.block_size * spec.num_kv_heads
        if spec.head_size == spec.head_size_v:
            dense, offset = 2 * per_side * key, (side * per_side + within) * key
        else:
            dense, offset = per_side * (key + value), within * (key + value) + side * key
        return block * (spec.page_size_padded or dense) + offset


def stored_bytes(found: AttentionSpec, row: list[float]) -> bytes:
    """Return what one head of small whole numbers is stored as; int8 rows hold a 127."""
    if found.dtype is torch.int8:
        values = bytes(int(x) & 0xFF for x in row)
        gap = bytes([POISON]) * (-len(row) % 4)
        return values + gap + struct.pack("<f", 1.0)  # 127 / 127
    return bytes(torch.tensor(row).to(found.dtype).view(torch.uint8).tolist())


def rows_of(num_tokens: int, heads: int, width: int, seed: int, *, has_127: bool) -> Tensor:
    """Return whole numbers in -8..8, exact in every format; never 0, whose bytes say little."""
    count = num_tokens * heads * width
    numbers = torch.arange(seed, seed + count) % 16 - 8
    rows = torch.where(numbers >= 0, numbers + 1, numbers).float()
    rows = rows.view(num_tokens, heads, width)
    if has_127:
        rows[..., 0] = 127
    return rows


@contextmanager
def way_of(place: str) -> Iterator[None]:
    """Write as on the host, or as on a device, where nothing may wait for a value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_write, "_is_on_host", lambda tensor: place == "host")
        yield


@pytest.fixture(params=["host", "device"])
def _each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    with way_of(request.param):
        yield


layouts = st.sampled_from(["NHD", "HND"])
ways = st.sampled_from(["host", "device"])
widths = st.integers(1, 6)


@given(
    st.sampled_from(FORMATS),
    layouts,
    st.integers(1, 4),
    st.integers(1, 3),
    widths,
    widths,
    st.data(),
)
@settings(max_examples=60)
def test_every_byte_is_where_the_format_says(
    kind: tuple[str, torch.dtype],
    layout: str,
    block_size: int,
    heads: int,
    width: int,
    width_v: int,
    data: st.DataObject,
) -> None:
    name, dtype = kind
    found = spec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=width,
        head_size_v=width_v,
        dtype=dtype,
        kv_cache_dtype=name,
        layout=layout,
    )
    if data.draw(st.booleans(), label="is padded"):
        found = replace(found, page_size_padded=found.page_size_bytes + 3 * found.alignment)
    num_blocks = data.draw(st.integers(1, 3), label="num_blocks")
    all_slots = st.permutations(range(num_blocks * block_size))
    slots = data.draw(all_slots, label="slots")[: data.draw(st.integers(0, 6), label="tokens")]
    pads = data.draw(st.lists(st.integers(0, len(slots)), max_size=3), label="pads")
    for place in pads:
        slots.insert(place, PAD_SLOT_ID)
    key = rows_of(len(slots), heads, width, 0, has_127=dtype is torch.int8)
    value = rows_of(len(slots), heads, width_v, 5, has_127=dtype is torch.int8)
    cache = poisoned(found, num_blocks)
    expected = raw(cache)
    for token, slot in enumerate(slots):
        if slot == PAD_SLOT_ID:
            continue
        for side, rows in enumerate((key, value)):
            for head in range(heads):
                entry = stored_bytes(found, rows[token, head].tolist())
                start = Address(found).of(side, slot // block_size, slot % block_size, head)
                expected[start : start + len(entry)] = entry
    with way_of(data.draw(ways, label="way")):
        write_kv(cache, found, key, value, torch.tensor(slots, dtype=torch.int64))
    assert raw(cache) == expected


@pytest.mark.parametrize(
    ("name", "dtype", "values", "scale", "stored"),
    [
        # bits by hand: sign, exponent, mantissa; e4m3fn has bias 7, e4m3fnuz 8, e5m2 15
        ("fp8", FN, [1.0, 2.0, -1.0], 1.0, [0x38, 0x40, 0xB8]),
        ("fp8", FN, [448.0, 1e6, -1e6], 1.0, [0x7E, 0x7E, 0xFE]),
        ("fp8", FN, [1.0, 2.0, -1.0], 0.5, [0x40, 0x48, 0xC0]),
        ("fp8", FNUZ, [1.0, 2.0, -1.0], 1.0, [0x40, 0x48, 0xC0]),
        ("fp8", FNUZ, [240.0, 1e6, -1e6], 1.0, [0x7F, 0x7F, 0xFF]),
        ("fp8_e5m2", E5M2, [1.0, 2.0, -1.0], 1.0, [0x3C, 0x40, 0xBC]),
        ("fp8_e5m2", E5M2, [57344.0, 1e9, -1e9], 1.0, [0x7B, 0x7B, 0xFB]),
    ],
)
def test_fp8_bytes_by_hand(
    name: str, dtype: torch.dtype, values: list[float], scale: float, stored: list[int]
) -> None:
    found = spec(block_size=1, num_kv_heads=1, kv_cache_dtype=name, dtype=dtype)
    cache = poisoned(found, 1)
    rows = torch.tensor(values).view(1, 1, 3)
    write_kv(cache, found, rows, rows, torch.tensor([0]), k_scale=scale, v_scale=scale)
    assert list(raw(cache)) == stored + stored


def test_key_and_value_have_scales_of_their_own_per_head() -> None:
    found = spec(block_size=1, head_size=1, head_size_v=1, kv_cache_dtype="fp8", dtype=FN)
    cache = poisoned(found, 1)
    ones = torch.ones(1, 2, 1)
    k_scale, v_scale = torch.tensor([1.0, 0.5]), torch.tensor([2.0, 1.0])
    write_kv(cache, found, ones, ones, torch.tensor([0]), k_scale=k_scale, v_scale=v_scale)
    # e4m3fn: 1 is 0x38, 2 is 0x40, 0.5 is 0x30
    assert list(raw(cache)) == [0x38, 0x40, 0x30, 0x38]


def test_int8_rows_have_a_scale_of_their_own() -> None:
    name, dtype = "int8_per_token_head", torch.int8
    found = spec(block_size=1, num_kv_heads=1, kv_cache_dtype=name, dtype=dtype)
    cache = poisoned(found, 1)
    key = torch.tensor([[[63.5, -63.5, 1.0]]])  # scale 63.5 / 127 = 0.5
    value = torch.zeros(1, 1, 3)
    write_kv(cache, found, key, value, torch.tensor([0]))
    assert list(raw(cache)) == [127, 129, 2, POISON, 0, 0, 0, 0x3F, 0, 0, 0, POISON, 0, 0, 0, 0]


@given(st.sampled_from(FORMATS), layouts, st.sampled_from([3, 5]), st.booleans(), st.data())
@settings(max_examples=30)
def test_what_was_written_is_gathered(
    kind: tuple[str, torch.dtype], layout: str, width_v: int, is_padded: bool, data: st.DataObject
) -> None:
    name, dtype = kind
    found = spec(dtype=dtype, kv_cache_dtype=name, layout=layout, head_size_v=width_v)
    if is_padded:
        found = replace(found, page_size_padded=found.page_size_bytes + 8)
    length = data.draw(st.integers(1, 16), label="length")
    start = data.draw(st.integers(0, length), label="start")
    table = torch.tensor([data.draw(st.permutations(range(5)), label="table")[:4]])
    key = rows_of(length, 2, 3, 0, has_127=dtype is torch.int8)
    value = rows_of(length, 2, width_v, 3, has_127=dtype is torch.int8)
    cache = poisoned(found, 5)
    bounds, lengths = torch.tensor([0, length]), torch.tensor([length])
    write_kv(cache, found, key, value, slot_mapping_for(table, bounds, lengths, 4))
    views = found.split(cache)
    for view, scales, rows in (
        (views.key, views.key_scale, key),
        (views.value, views.value_scale, value),
    ):
        read = gather_rows(view, table[0], length, start=start).float()
        if scales is not None:
            read = read * gather_rows(scales, table[0], length, start=start).unsqueeze(-1)
        assert torch.equal(read, rows[start:])


def test_gathering_reads_no_table_entry_past_the_last_block() -> None:
    view = torch.arange(12.0).view(3, 4, 1, 1)
    table = torch.tensor([2, 0, 2**31 - 1, -1])
    assert gather_rows(view, table, 5).flatten().tolist() == [8, 9, 10, 11, 0]
    assert gather_rows(view, table, 8, start=3).flatten().tolist() == [11, 0, 1, 2, 3]
    assert gather_rows(view, table, 8, start=4).flatten().tolist() == [0, 1, 2, 3]
    assert gather_rows(view, table, 0).shape == (0, 1, 1)
    assert gather_rows(view, table, 4, start=4).shape == (0, 1, 1)


@pytest.mark.usefixtures("_each_way")
@pytest.mark.parametrize("slots", [[-1], [-1, -1, -1], [0, -1], [-1, 0], [-1, 0, -1], [7, -1], []])
def test_a_pad_is_never_written(slots: list[int]) -> None:
    found = spec(head_size=1, head_size_v=1, num_kv_heads=1)
    cache = torch.full_like(found.allocate(2, "cpu"), 5.0)
    rows = torch.arange(1.0, 1 + len(slots)).view(-1, 1, 1)
    write_kv(cache, found, rows, -rows, torch.tensor(slots, dtype=torch.int64))
    expected_key, expected_value = [5.0] * 8, [5.0] * 8
    for row, slot in zip(rows.flatten().tolist(), slots, strict=True):
        if slot >= 0:
            expected_key[slot], expected_value[slot] = row, -row
    views = found.split(cache)
    assert views.key.flatten().tolist() == expected_key
    assert views.value.flatten().tolist() == expected_value


@pytest.mark.usefixtures("_each_way")
def test_a_pad_keeps_even_nan_out_of_the_cache() -> None:
    found = spec()
    cache = found.allocate(2, "cpu")
    rows = torch.full((3, 2, 3), float("nan"))
    rows[1] = 1.0
    write_kv(cache, found, rows, rows, torch.tensor([-1, 0, -1]))
    assert cache.sum() == 2 * 2 * 3
    write_kv(cache, found, rows, rows, torch.tensor([-1, -1, -1]))
    assert cache.sum() == 2 * 2 * 3


@pytest.mark.usefixtures("_each_way")
def test_rows_past_the_slots_are_padding() -> None:
    found = spec()
    cache = found.allocate(2, "cpu")
    write_kv(cache, found, torch.ones(5, 2, 3), torch.ones(4, 2, 3), torch.tensor([6]))
    assert cache.sum() == 2 * 2 * 3


@pytest.mark.usefixtures("_each_way")
def test_a_view_of_a_larger_cache_is_written_in_place() -> None:
    found = spec()
    whole = found.allocate(6, "cpu")
    write_kv(whole[::2], found, torch.ones(1, 2, 3), torch.ones(1, 2, 3), torch.tensor([5]))
    assert whole.sum() == whole[2].sum() == 2 * 2 * 3


@dataclass
class Call:
    """The arguments of a call that is right, for tests that make one of them wrong."""

    spec: AttentionSpec
    key: Tensor
    value: Tensor
    slots: Tensor

    def run(self, **scales: Any) -> None:
        cache = self.spec.allocate(2, "cpu")
        write_kv(cache, self.spec, self.key, self.value, self.slots, **scales)
        assert not cache.any()


@pytest.fixture
def call() -> Call:
    return Call(spec(), torch.zeros(2, 2, 3), torch.zeros(2, 2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("argument", "tensor", "message"),
    [
        ("key", torch.zeros(2, 2, 4), r"key shape is \(2, 2, 4\); allowed: \(at least 2, 2, 3\)"),
        ("key", torch.zeros(1, 2, 3), r"key shape is \(1, 2, 3\); allowed: \(at least 2, 2, 3\)"),
        ("value", torch.zeros(2, 6), r"value shape is \(2, 6\); allowed: \(at least 2, 2, 3\)"),
        ("slots", torch.zeros(2), r"slot_mapping is float32 \(2,\); allowed: int64 \(T,\)"),
        ("slots", torch.zeros(2, dtype=torch.int32), r"slot_mapping is int32 .* fit 32 bits"),
        ("slots", torch.zeros(2, 1, dtype=torch.int64), r"slot_mapping is int64 \(2, 1\)"),
        ("key", torch.zeros(2, 2, 3, device="meta"), "device of key is meta; allowed: cpu, the"),
        ("value", torch.zeros(2, 2, 3, device="meta"), "device of value is meta; allowed: cpu"),
        (
            "slots",
            torch.zeros(2, dtype=torch.int64, device="meta"),
            "device of slot_mapping is meta; allowed: cpu, the device of kv_cache",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    call: Call, argument: str, tensor: Tensor, message: str
) -> None:
    call.run()
    setattr(call, argument, tensor)
    with pytest.raises(InvalidInputError, match=message):
        call.run()


@pytest.mark.parametrize("scale", [0.5, torch.tensor(2.0), torch.tensor([1.0, 2.0])])
@pytest.mark.parametrize(
    ("name", "dtype"), [("auto", torch.float32), ("int8_per_token_head", torch.int8)]
)
def test_a_scale_is_never_dropped(
    call: Call, name: str, dtype: torch.dtype, scale: float | Tensor
) -> None:
    call.spec = replace(call.spec, kv_cache_dtype=name, dtype=dtype)
    call.run(k_scale=1.0, v_scale=torch.ones(2))
    with pytest.raises(InvalidInputError, match=f"k_scale is .*1 with kv_cache_dtype='{name}'"):
        call.run(k_scale=scale)
    with pytest.raises(InvalidInputError, match="v_scale is"):
        call.run(v_scale=scale)


def test_a_format_that_torch_does_not_write_is_refused(call: Call) -> None:
    call.spec = replace(call.spec, kv_cache_dtype="fp8_per_token_head", dtype=FN)
    with pytest.raises(UnsupportedOptionError, match="'fp8_per_token_head' of FullAttentionSpec"):
        call.run()


def test_another_cache_is_refused(call: Call) -> None:
    with pytest.raises(InvalidInputError, match="kv_cache dtype is float16; allowed: float32"):
        write_kv(call.spec.allocate(2, "cpu").half(), call.spec, call.key, call.value, call.slots)


def test_a_slot_past_the_cache_is_refused_on_the_host(call: Call) -> None:
    cache, num_slots = call.spec.allocate(2, "cpu"), 2 * call.spec.block_size
    slots = call.slots.clone()
    slots[1] = num_slots
    with pytest.raises(InvalidInputError, match=rf"slot_mapping\[1\] is {num_slots}; .* 2 blocks"):
        write_kv(cache, call.spec, call.key, call.value, slots)
    assert not cache.any()
    slots[1] = -2
    with pytest.raises(InvalidInputError, match=r"slot_mapping\[1\] is -2; allowed: a slot, or -1"):
        write_kv(cache, call.spec, call.key, call.value, slots)
    found = latent_spec()
    latents = found.allocate(2, "cpu")
    with pytest.raises(InvalidInputError, match=r"slot_mapping\[0\] is 4; allowed: below 4"):
        concat_and_cache_mla(latents, found, torch.ones(1, 2), torch.ones(1, 1), torch.tensor([4]))
    assert not latents.any()


def latent_spec(**options: Any) -> MLAAttentionSpec:
    plain: dict[str, Any] = {
        "block_size": 2,
        "head_size": 3,
        "kv_lora_rank": 2,
        "dtype": torch.float32,
    }
    return MLAAttentionSpec(**{**plain, **options})


@pytest.mark.usefixtures("_each_way")
def test_a_latent_is_followed_by_its_rope_part() -> None:
    found = latent_spec()
    cache = found.allocate(2, "cpu")
    latent, rope = torch.tensor([[1.0, 2], [4, 5], [7, 8]]), torch.tensor([[3.0], [6], [9]])
    concat_and_cache_mla(cache, found, latent, rope, torch.tensor([3, -1, 0]))
    assert cache.view(4, 3).tolist() == [[7, 8, 9], [0, 0, 0], [0, 0, 0], [1, 2, 3]]
    concat_and_cache_mla(cache, found, latent, rope, torch.tensor([-1, -1, -1]))
    concat_and_cache_mla(cache, found, latent, rope, torch.tensor([], dtype=torch.int64))
    assert cache.view(4, 3).tolist() == [[7, 8, 9], [0, 0, 0], [0, 0, 0], [1, 2, 3]]


@pytest.mark.usefixtures("_each_way")
def test_an_fp8_latent_has_one_scale_and_saturates() -> None:
    found = latent_spec(block_size=1, kv_cache_dtype="fp8", dtype=FN)
    cache = poisoned(found, 1)
    latent, rope = torch.tensor([[1.0, 1e6]]), torch.tensor([[-0.5]])
    concat_and_cache_mla(cache, found, latent, rope, torch.tensor([0]), scale=0.5)
    assert list(raw(cache)) == [0x40, 0x7E, 0xB8]  # 2, 448 and -1 in e4m3fn


@pytest.mark.parametrize(
    ("latent", "rope", "options", "message"),
    [
        ((2, 3), (2, 1), {}, r"latent shape is \(2, 3\); allowed: \(at least 2, 2\)"),
        ((2, 2), (2, 2), {}, r"rope shape is \(2, 2\); allowed: \(at least 2, 1\)"),
        ((2, 2), (1, 1), {}, r"rope shape is \(1, 1\)"),
        ((2, 2), (2, 1), {"scale": 0.5}, "scale is 0.5; allowed: 1 with kv_cache_dtype='auto'"),
    ],
)
def test_a_latent_that_does_not_fit_is_refused(
    latent: tuple[int, int], rope: tuple[int, int], options: dict[str, Any], message: str
) -> None:
    found = latent_spec()
    with pytest.raises(InvalidInputError, match=message):
        concat_and_cache_mla(
            found.allocate(2, "cpu"),
            found,
            torch.zeros(latent),
            torch.zeros(rope),
            torch.tensor([0, 1]),
            **options,
        )


def test_a_latent_format_that_torch_does_not_write_is_refused() -> None:
    found = latent_spec(kv_cache_dtype="int8_per_token_head", dtype=torch.int8)
    with pytest.raises(UnsupportedOptionError, match="'int8_per_token_head' of MLAAttentionSpec"):
        concat_and_cache_mla(
            found.allocate(1, "cpu"),
            found,
            torch.zeros(1, 2),
            torch.zeros(1, 1),
            torch.tensor([0]),
        )


def untouched_bytes(count: int) -> Tensor:
    """Return zero bytes of which a page exists only once it is touched."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        pytest.skip("needs memory that is not committed before it is touched")
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.mark.usefixtures("_each_way")
def test_offsets_have_64_bits() -> None:
    # One byte per element, and a page so wide that the second block starts past 2**31 elements,
    # where a 32-bit offset would be negative, and the third past 2**32, where it would wrap to 32.
    page = 2**31 + 16
    found = spec(
        block_size=1,
        num_kv_heads=1,
        head_size=4,
        head_size_v=4,
        kv_cache_dtype="fp8",
        dtype=FN,
        page_size_padded=page,
    )
    flat = untouched_bytes(2 * page + 64)
    cache = flat.view(FN).as_strided(found.shape(3), found.strides(3))
    rows = torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 1, 4)
    write_kv(cache, found, rows, rows, torch.tensor([1, 2]))
    assert flat[page : page + 8].tolist() == [0x38] * 8
    assert flat[2 * page : 2 * page + 8].tolist() == [0x40] * 8
    assert not flat[:64].any()
    gathered = gather_rows(found.split(cache).value, torch.tensor([2, 1, 0], dtype=torch.int32), 3)
    assert gathered.float()[:, 0, 0].tolist() == [2.0, 1.0, 0.0]


def test_positions_count_from_the_end_of_each_request() -> None:
    request, position = token_positions(torch.tensor([0, 3, 4, 4, 6]), torch.tensor([3, 9, 5, 0]))
    assert request.tolist() == [0, 0, 0, 1, 3, 3]
    assert position.tolist() == [0, 1, 2, 8, -2, -1]  # the last row is padding: seq_len 0


def test_slots_follow_the_block_table() -> None:
    table = torch.tensor([[5, 1], [7, 3], [9, 9]], dtype=torch.int32)
    slots = slot_mapping_for(
        table, torch.tensor([0, 3, 4, 6]), torch.tensor([6, 5, 0]), block_size=4
    )
    # positions 3, 4, 5 of request 0: the last of block 5, two of block 1; position 4 of request 1
    assert slots.tolist() == [5 * 4 + 3, 1 * 4, 1 * 4 + 1, 3 * 4, -1, -1]
    assert slots.dtype is torch.int64


def test_slots_of_large_block_ids_have_64_bits() -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    slots = slot_mapping_for(table, torch.tensor([0, 1]), torch.tensor([16]), block_size=16)
    assert slots.tolist() == [(2**31 - 1) * 16 + 15]


def test_an_empty_batch_has_no_slots() -> None:
    table = torch.zeros(0, 4, dtype=torch.int32)
    empty = torch.zeros(0, dtype=torch.int32)
    assert slot_mapping_for(table, torch.tensor([0]), empty, 16).tolist() == []


@pytest.mark.parametrize(
    ("options", "scales", "message"),
    [
        ({}, {"k_scale": 2.0}, "k_scale"),
        ({"dtype": FN, "kv_cache_dtype": "fp8"}, {"v_scale": 0.0}, "positive finite"),
        ({"dtype": FN, "kv_cache_dtype": "fp8"}, {"k_scale": torch.ones(3)}, "scale.shape"),
    ],
)
def test_check_write_refuses_scales_without_writing(
    options: dict[str, Any], scales: dict[str, Any], message: str
) -> None:
    found = spec(**options)
    cache = found.allocate(2, "cpu")
    ones = torch.ones(1, 2, 3)
    with pytest.raises(InvalidInputError, match=message):
        check_write(cache, found, ones, ones, torch.tensor([0]), **scales)
    assert not any(raw(cache))


def test_check_write_returns_the_views_of_a_call_that_is_right() -> None:
    found = spec()
    cache = found.allocate(2, "cpu")
    ones = torch.ones(1, 2, 3)
    views = check_write(cache, found, ones, ones, torch.tensor([0]))
    assert views.key.data_ptr() == cache.data_ptr()
    assert not any(raw(cache))
