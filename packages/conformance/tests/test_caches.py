from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_conformance._caches import Entries, cache_spec, differing_blocks, filled_cache, raw_bytes
from attn_conformance._tables import Placement
from attn_conformance.case import Case
from attn_shared.kv_cache import AttentionSpec
from attn_shared.request import AttentionType

PLACEMENT = Placement(
    table=torch.tensor([[2, 0]], dtype=torch.int32),
    num_blocks=3,
    block_ids=(0, 1, 2),
    live_slots=(8, 9, 10, 11, 0),
    new_slots=(0,),
)


def entries(case: Case, slots: tuple[int, ...] = (8, 9, 10, 11)) -> Entries:
    shape = (len(slots), case.num_kv_heads, case.head_size)
    rows = torch.ones(shape, dtype=case.dtype)
    return Entries(key=rows, value=2 * rows, slots=slots, k_scale=1.0, v_scale=1.0)


def filled(case: Case) -> tuple[AttentionSpec, Tensor]:
    spec = cache_spec(case, torch.float8_e4m3fn)
    assert spec is not None
    return spec, filled_cache(case, spec, PLACEMENT, entries(case), torch.device("cpu"))


CASE = Case(name="c", query_lens=(1,), seq_lens=(5,), head_size=8)


def test_cache_free_cases_have_no_format() -> None:
    case = CASE.with_fields(attn_type=AttentionType.ENCODER)
    assert cache_spec(case, torch.float8_e4m3fn) is None


def test_the_flavour_is_the_devices_unless_the_case_says_another() -> None:
    case = CASE.with_fields(kv_cache_dtype="fp8")
    spec = cache_spec(case, torch.float8_e4m3fnuz)
    assert spec is not None
    assert spec.dtype is torch.float8_e4m3fnuz
    fixed = case.with_fields(fp8_e4m3_dtype=torch.float8_e4m3fn)
    spec = cache_spec(fixed, torch.float8_e4m3fnuz)
    assert spec is not None
    assert spec.dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_owned_slots_hold_numbers_tails_the_largest_one_and_all_else_nan(
    dtype: torch.dtype,
) -> None:
    spec, kv_cache = filled(CASE.with_fields(dtype=dtype))
    key, value, *_ = spec.split(kv_cache)
    assert bool((key[2] == 1).all())
    assert bool((value[2] == 2).all())
    assert bool((key[0] == torch.finfo(dtype).max).all())  # slot 0 is live and not yet written
    assert bool(key[1].isnan().all())
    assert bool(value[1].isnan().all())


def test_nan_tails() -> None:
    spec, kv_cache = filled(CASE.with_fields(nan_tail=True))
    assert bool(spec.split(kv_cache).key[0].isnan().all())


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("flavour", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_fp8_poison_is_nan(kv_cache_dtype: str, flavour: torch.dtype) -> None:
    spec, kv_cache = filled(CASE.with_fields(kv_cache_dtype=kv_cache_dtype, fp8_e4m3_dtype=flavour))
    key = spec.split(kv_cache).key
    assert bool(key[1].float().isnan().all())
    assert bool(key[0].float().isfinite().all())


def test_int8_poison_lies_in_the_scales() -> None:
    spec, kv_cache = filled(CASE.with_fields(kv_cache_dtype="int8_per_token_head"))
    views = spec.split(kv_cache)
    assert views.key_scale is not None
    assert bool(views.key_scale[1].isnan().all())
    assert bool((views.key_scale[0] == 1e30).all())


def test_gaps_between_blocks_are_poisoned_too() -> None:
    _, kv_cache = filled(CASE.with_fields(block_padding=4))
    storage = torch.empty(0, dtype=torch.float32).set_(kv_cache.untyped_storage())
    dense = kv_cache[0].numel()
    assert bool(storage[dense : dense + 4].isnan().all())


def test_a_sparse_cache_is_poisoned_where_it_matters() -> None:
    case = CASE.with_fields(cache_elements=1)
    spec, kv_cache = filled(case)
    assert bool(spec.split(kv_cache).key[1].isnan().all())


def test_differing_blocks_are_found_byte_by_byte_even_in_gaps() -> None:
    _, ours = filled(CASE.with_fields(block_padding=4))
    _, theirs = filled(CASE.with_fields(block_padding=4))
    assert differing_blocks(ours, theirs, PLACEMENT) == []  # NaN equals itself as bytes
    dense, step = ours[0].numel() * 4, ours.stride(0) * 4
    raw_bytes(ours)[step + dense] ^= 1  # a gap after block 1
    raw_bytes(ours)[2 * step] ^= 1
    assert differing_blocks(ours, theirs, PLACEMENT) == [1, 2]


def test_entries_without_some_slots_and_followed_by_others() -> None:
    old = entries(CASE).without((9, 10))
    assert old.slots == (8, 11)
    both = old.followed_by(entries(CASE, (0,)))
    assert both.slots == (8, 11, 0)
    assert len(both.key) == len(both.value) == 3
