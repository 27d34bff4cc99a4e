from __future__ import annotations

from dataclasses import replace

import torch

from attn_conformance.fit import Fit
from attn_conformance.reference_backend import REFERENCE_CAPABILITY
from attn_shared.capability import MultipleOf, SizeSet
from attn_shared.dtypes import KVCacheLayout


def test_a_capability_that_takes_all_gets_the_smallest_and_most_exact() -> None:
    fit = Fit(REFERENCE_CAPABILITY)
    assert (fit.block_size, fit.head_size, fit.dtype) == (4, 16, torch.float32)
    assert (fit.kv_cache_dtype, fit.layout) == ("auto", KVCacheLayout.NHD)


def test_a_narrow_capability_gets_what_it_takes() -> None:
    narrow = replace(
        REFERENCE_CAPABILITY,
        block_sizes=(MultipleOf(16), 24),
        head_sizes=SizeSet(minimum=64, multiple_of=64),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        kv_cache_dtypes=frozenset({"fp8_e5m2", "fp8"}),
        kv_layouts=(KVCacheLayout.HND,),
    )
    fit = Fit(narrow)
    assert (fit.block_size, fit.head_size, fit.dtype) == (16, 64, torch.bfloat16)
    assert (fit.kv_cache_dtype, fit.layout) == ("fp8", KVCacheLayout.HND)


def test_a_block_of_one_listed_size_is_taken_as_its_multiple() -> None:
    assert Fit(replace(REFERENCE_CAPABILITY, block_sizes=(3,))).block_size == 6
    limited = replace(REFERENCE_CAPABILITY, block_sizes=(1,), max_block_size=2)
    assert Fit(replace(limited, preferred_block_size=2)).block_size == 2


def test_a_capability_that_takes_nothing_still_gets_cases() -> None:
    nothing = replace(
        REFERENCE_CAPABILITY,
        block_sizes=(),
        head_sizes=SizeSet.of(),
        dtypes=frozenset(),
        kv_cache_dtypes=frozenset(),
        kv_layouts=(),
    )
    case = Fit(nothing).case("c", (1,), (5,))
    assert (case.block_size, case.head_size, case.dtype) == (16, 16, torch.float32)


def test_fields_of_a_case_go_before_the_choices() -> None:
    case = Fit(REFERENCE_CAPABILITY).case("c", [1, 2], range(4, 6), head_size=80)
    assert case.head_size == 80
    assert case.query_lens == (1, 2)
    assert case.seq_lens == (4, 5)
