"""Writing paged caches with Triton: every byte against the torch writer, refusals by its words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_shared import kv_write as by_torch
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, FullAttentionSpec
from attn_triton.kv_write import write_kv

FN, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
FORMATS = [
    pytest.param("auto", torch.float16, id="float16"),
    pytest.param("auto", torch.bfloat16, id="bfloat16"),
    pytest.param("float32", torch.float32, id="float32"),
    pytest.param("fp8", FN, id="e4m3fn"),
    pytest.param("fp8_e4m3", FNUZ, id="e4m3fnuz"),
    pytest.param("fp8_e5m2", E5M2, id="e5m2"),
    pytest.param("int8_per_token_head", torch.int8, id="int8"),
]
SLOTS = [3, -1, 0, 17, 5, -1, 31, 30]


def spec(
    kv_cache_dtype: str = "auto", dtype: torch.dtype = torch.float32, **options: Any
) -> AttentionSpec:
    plain: dict[str, Any] = {"block_size": 4, "num_kv_heads": 3, "head_size": 8, "head_size_v": 8}
    found = {**plain, "kv_cache_dtype": kv_cache_dtype, "dtype": dtype, **options}
    return FullAttentionSpec(**found)


def slot_tensor(device: torch.device, slots: list[int] = SLOTS) -> Tensor:
    return torch.tensor(slots, dtype=torch.int64, device=device)


def rows(found: AttentionSpec, device: torch.device, tokens: int = 8) -> tuple[Tensor, Tensor]:
    """Random keys and values that go far over the range of fp8 when divided by a small scale."""
    generator = torch.Generator().manual_seed(len(found.kv_cache_dtype))
    dtype = found.dtype if found.dtype in (torch.float16, torch.bfloat16) else torch.float32
    shapes = [(tokens, found.num_kv_heads, size) for size in (found.head_size, found.head_size_v)]
    key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return key * 100, value


def raw(cache: Tensor) -> Tensor:
    """All bytes of the cache's memory, padding included."""
    size = cache.untyped_storage().nbytes()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        cache.untyped_storage(), 0, (size,)
    )


def assert_same(
    found: AttentionSpec, key: Tensor, value: Tensor, slots: Tensor, **scales: Any
) -> None:
    """Both leave the same bytes, in a cache whose every other byte was 0x55.

    torch writes on the host, where it divides; on a GPU it multiplies by reciprocals of numbers.
    """
    got, expected = found.allocate(8, key.device), found.allocate(8, "cpu")
    for cache in (got, expected):
        raw(cache).fill_(0x55)
    write_kv(got, found, key, value, slots, **scales)
    near = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in scales.items()}
    by_torch.write_kv(expected, found, key.cpu(), value.cpu(), slots.cpu(), **near)
    assert torch.equal(raw(got).cpu(), raw(expected))
    assert (raw(got) != 0x55).any()


@pytest.mark.parametrize(("head_size", "head_size_v"), [(8, 8), (5, 5), (16, 6)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_every_byte(
    name: str,
    dtype: torch.dtype,
    layout: str,
    head_size: int,
    head_size_v: int,
    device: torch.device,
) -> None:
    found = spec(name, dtype, layout=layout, head_size=head_size, head_size_v=head_size_v)
    key, value = rows(found, device)
    scales: dict[str, Any] = {}
    if name.startswith("fp8"):
        per_head = torch.tensor([0.5, 1.5, 3.0], device=device)
        scales = {"k_scale": per_head, "v_scale": 0.01}
    assert_same(found, key, value, slot_tensor(device), **scales)


def test_a_place_by_hand(device: torch.device) -> None:
    # Slot 6 of blocks of 4 is offset 2 of block 1; head 2 of the value starts at 2 * 8 elements.
    found = spec()
    cache = found.allocate(3, device)
    key, value = rows(found, device, tokens=1)
    write_kv(cache, found, key, value, slot_tensor(device, [6]))
    assert torch.equal(cache[1, 1, 2, 2], value[0, 2])
    assert torch.equal(cache[1, 0, 2], key[0])
    assert cache.count_nonzero() == key.count_nonzero() + value.count_nonzero()


@pytest.mark.parametrize("dtype", [FN, FNUZ, E5M2], ids=str)
def test_every_rounding_of_fp8(dtype: torch.dtype, device: torch.device) -> None:
    # Each finite code, the halfway points between neighbours and what lies beside those, both
    # signs, what is over the range, infinities, NaN and zeros.
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = codes[codes.isfinite() & (codes >= 0)].sort().values
    halfway = (values[1:] + values[:-1]) / 2
    least = torch.finfo(dtype).tiny / 2**10
    found = [values, halfway, halfway.nextafter(values[1:]), halfway.nextafter(values[:-1])]
    found += [torch.tensor([1e9, torch.finfo(dtype).max * 1.5, torch.inf, torch.nan, least])]
    magnitudes = torch.cat(found)
    x = torch.cat((magnitudes, -magnitudes))
    name = "fp8_e5m2" if dtype is E5M2 else "fp8"
    one_row = spec(name, dtype, num_kv_heads=1, head_size=len(x), head_size_v=len(x))
    key = x.view(1, 1, -1).to(device)
    expected, got = one_row.allocate(1, device), one_row.allocate(1, device)
    slots = slot_tensor(device, [0])
    by_torch.write_kv(expected, one_row, key, key, slots)
    write_kv(got, one_row, key, key, slots)
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.float().signbit(), expected.float().signbit()) or dtype is FNUZ


@pytest.mark.parametrize("kind", ["number", "one element", "per head", "from the host"])
def test_kinds_of_scales(kind: str, device: torch.device) -> None:
    found = spec("fp8", FN)
    scale: Any = {
        "number": 2.5,
        "one element": torch.tensor([2.5], device=device),
        "per head": torch.tensor([2.5, 0.5, 7.0, 1.0], device=device)[:3],
        "from the host": torch.tensor(2.5),
    }[kind]
    key, value = rows(found, device)
    assert_same(found, key, value, slot_tensor(device), k_scale=scale, v_scale=scale)


def test_rows_of_zeros_in_int8(device: torch.device) -> None:
    found = spec("int8_per_token_head", torch.int8)
    key, value = rows(found, device)
    key[3] = 0
    assert_same(found, key, value, slot_tensor(device))


def test_padded_blocks(device: torch.device) -> None:
    dense = spec(dtype=torch.float16).page_size_bytes
    found = spec(dtype=torch.float16, page_size_padded=dense + 34)
    assert_same(found, *rows(found, device), slot_tensor(device))


def strided(x: Tensor, how: str) -> Tensor:
    """The same values in other memory."""
    if how == "slice of more heads":
        return torch.cat((x, x, x), dim=1)[:, 3:6]
    if how == "heads first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "elements apart":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if how == "odd address":
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    return x[:1].expand(x.shape)


@pytest.mark.parametrize(
    "how", ["slice of more heads", "heads first", "elements apart", "odd address", "expanded"]
)
def test_rows_of_any_strides(how: str, device: torch.device) -> None:
    found = spec(dtype=torch.bfloat16)
    key, value = rows(found, device)
    assert_same(found, strided(key, how), strided(value, how), slot_tensor(device))


def test_slots_of_any_stride(device: torch.device) -> None:
    found = spec()
    every_second = slot_tensor(device).repeat_interleave(2)[::2]
    assert_same(found, *rows(found, device), every_second)


def test_rows_past_the_slots_are_ignored(device: torch.device) -> None:
    found = spec()
    key, value = rows(found, device, tokens=20)
    assert_same(found, key, value[:9], slot_tensor(device))


def test_a_cache_inside_a_larger_tensor(device: torch.device) -> None:
    # Blocks of two layers interleaved, of which this is the second.
    found = spec(dtype=torch.float16)
    both = torch.zeros(8, 2, *found.shape(1)[1:], dtype=torch.float16, device=device)
    key, value = rows(found, device)
    write_kv(both[:, 1], found, key, value, slot_tensor(device))
    expected = found.allocate(8, device)
    by_torch.write_kv(expected, found, key, value, slot_tensor(device))
    assert torch.equal(both[:, 1], expected)
    assert not both[:, 0].any()


def test_casts_to_the_dtype_of_the_cache(device: torch.device) -> None:
    found = spec(dtype=torch.bfloat16)
    key, value = rows(spec(dtype=torch.float16), device)
    assert_same(found, key.float(), value, slot_tensor(device))


def test_nothing_to_write(device: torch.device) -> None:
    found = spec()
    cache = found.allocate(2, device)
    key, value = rows(found, device)
    write_kv(cache, found, key, value, slot_tensor(device, []))
    write_kv(cache, found, key, value, slot_tensor(device, [-1] * 8))
    assert not cache.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"key": torch.ones(8, 2, 8)}, "key shape", id="heads"),
        pytest.param({"value": torch.ones(7, 3, 8)}, "value shape", id="too few rows"),
        pytest.param(
            {"slot_mapping": torch.zeros(8, dtype=torch.int32)}, "slot_mapping", id="slots"
        ),
        pytest.param({"kv_cache": torch.zeros(8, 2, 4, 3, 9)}, "kv_cache shape", id="cache"),
        pytest.param({"k_scale": 2.0}, "k_scale", id="scale of a plain cache"),
        pytest.param({"v_scale": torch.full((3,), 2.0)}, "v_scale", id="scales of a plain cache"),
    ],
)
def test_refuses_as_the_torch_writer_does(wrong: dict[str, Any], message: str) -> None:
    found = spec()
    key, value = rows(found, torch.device("cpu"))
    call = {"kv_cache": found.allocate(8, "cpu"), "spec": found, "key": key, "value": value}
    call |= {"slot_mapping": slot_tensor(torch.device("cpu")), **wrong}
    errors = []
    for write in (by_torch.write_kv, write_kv):
        with pytest.raises(InvalidInputError, match=message) as caught:
            write(**call)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_scales_that_are_none(scale: float) -> None:
    found = spec("fp8", FN)
    key, value = rows(found, torch.device("cpu"))
    with pytest.raises(InvalidInputError, match="positive finite"):
        write_kv(found.allocate(8, "cpu"), found, key, value, torch.zeros(8).long(), v_scale=scale)


def test_refuses_formats_without_one_way_of_writing() -> None:
    found = spec("fp8_per_token_head", FN)
    key, value = rows(found, torch.device("cpu"))
    with pytest.raises(UnsupportedOptionError, match="fp8_per_token_head"):
        write_kv(found.allocate(8, "cpu"), found, key, value, torch.zeros(8).long())


@pytest.mark.interpreter
def test_refuses_too_few_rows_also_later() -> None:
    found = spec()
    cache = found.allocate(8, "cpu")
    key, value = rows(found, torch.device("cpu"))
    slots = slot_tensor(torch.device("cpu"))
    write_kv(cache, found, key, value, slots)
    with pytest.raises(InvalidInputError, match="key shape"):
        write_kv(cache, found, key[:3], value, slots)


@pytest.mark.cuda
def test_offsets_past_32_bits() -> None:
    found = spec(dtype=torch.float16, block_size=16, num_kv_heads=8, head_size=128, head_size_v=128)
    num_blocks = 2**31 // (2 * 16 * 8 * 128) + 2  # the last block starts past 2**31 elements
    cache = found.allocate(num_blocks, "cuda")
    key, value = rows(found, torch.device("cuda"), tokens=2)
    slots = slot_tensor(torch.device("cuda"), [num_blocks * 16 - 1, 5])
    write_kv(cache, found, key, value, slots)
    assert torch.equal(cache[-1, :, -1], torch.stack((key[0], value[0])))
    assert cache.count_nonzero() == key.count_nonzero() + value.count_nonzero()


@pytest.mark.cuda
def test_rows_past_32_bits() -> None:
    found = spec(dtype=torch.float16)
    far = torch.zeros(2**31 + 64, dtype=torch.float16, device="cuda")
    key = far.as_strided((3, 3, 8), (2**30, 8, 1))
    key[2] = 3.0
    cache = found.allocate(2, "cuda")
    write_kv(cache, found, key, key, slot_tensor(torch.device("cuda"), [0, 1, 7]))
    assert (cache[1, :, 3] == 3).all()
    assert cache.count_nonzero() == 2 * 3 * 8


@pytest.mark.cuda
def test_casts_by_instructions_and_by_integers_agree() -> None:
    from attn_triton import kv_write as module

    found = spec("fp8_e5m2", E5M2, num_kv_heads=1, head_size=128, head_size_v=128)
    x = torch.randn(8, 1, 128, generator=torch.Generator().manual_seed(3)).cuda() * 1e4
    slots = slot_tensor(torch.device("cuda"), list(range(8)))
    caches = []
    for casts in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_casts_to_fp8", lambda device, casts=casts: casts)
            patch.setattr(module, "_PLANS", {})
            caches.append(found.allocate(2, "cuda"))
            write_kv(caches[-1], found, x, x, slots)
    assert torch.equal(raw(caches[0]), raw(caches[1]))


@pytest.mark.cuda
def test_a_captured_write_follows_the_slots_of_each_replay() -> None:
    found = spec(dtype=torch.bfloat16)
    key, value = rows(found, torch.device("cuda"))
    cache = found.allocate(8, "cuda")
    slots = slot_tensor(torch.device("cuda"), [-1] * 8)
    write_kv(cache, found, key, value, slots)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv(cache, found, key, value, slots)
    for places in (SLOTS, list(range(8, 16))):
        slots.copy_(slot_tensor(slots.device, places))
        cache.zero_()
        graph.replay()
        expected = found.allocate(8, "cuda")
        by_torch.write_kv(expected, found, key, value, slots)
        assert torch.equal(cache, expected)
