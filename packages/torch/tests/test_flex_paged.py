"""Compiled calls: which pages a tile visits, and what the compiled kernel makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from flex_testing import (
    LONG,
    MIXED,
    REPEATED,
    SHARED_PREFIX,
    TWO_COLUMNS,
    CompiledBackend,
    compiles,
    impl_and_metadata,
    with_table,
)

from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import (
    InvalidInputError,
    MetadataError,
)
from attn_torch._flex_paged import PagedPlan, plan_paged
from attn_torch._flex_table import PagedTable
from attn_torch._spans import Span
from attn_torch._visibility import Visibility

BF16 = torch.bfloat16


def _table(rows: Sequence[Sequence[int]], key_lens: Sequence[int]) -> PagedTable:
    spans = [
        Span(request=i, query_start=i, query_len=1, position=key_len - 1, key_len=key_len)
        for i, key_len in enumerate(key_lens)
    ]
    return PagedTable.read(torch.tensor(rows, dtype=torch.int32), spans, Visibility(), 16)


def test_a_block_names_its_position_unless_it_stands_at_two() -> None:
    columns = _table(SHARED_PREFIX, (48, 48)).columns_by_block()
    assert columns is not None
    assert columns.tolist() == [1, 2, 2, 0]
    assert _table(TWO_COLUMNS, (48, 48)).columns_by_block() is None
    assert _table(REPEATED, (48, 48)).columns_by_block() is None
    assert _table(REPEATED, (16, 32)).columns_by_block() is not None  # the repeats are not used


@compiles
def test_compiled_in_place() -> None:
    """The kernel reads the cache through the block mask: a shared prefix, two heads per kv head."""
    case = LONG.with_fields(
        query_lens=(2, 20),
        seq_lens=(48, 39),
        causal=(True, False),
        window=(30, 8),
        softcap=2.0,
        has_alibi=True,
        layout=KVCacheLayout.HND,
        mm_prefix_ranges={0: [(3, 47)]},
    )
    batch = with_table(case, SHARED_PREFIX)
    assert batch.kv_cache is not None
    batch.kv_cache[4:] = torch.nan  # blocks of nobody
    _, metadata = impl_and_metadata(batch, CompiledBackend)
    assert metadata.compiled is not None
    assert metadata.compiled.slots is None
    output, _ = batch.run(CompiledBackend, with_lse=False)
    batch.check(output)


@compiles
def test_compiled_over_gathered_keys() -> None:
    """Repeated blocks, in bfloat16, with rows that see nothing."""
    case = LONG.with_fields(
        query_lens=(50, 20), seq_lens=(48, 39), dtype=BF16, num_heads=3, num_kv_heads=1
    )
    batch = with_table(case, REPEATED)
    _, metadata = impl_and_metadata(batch, CompiledBackend)
    assert metadata.compiled is not None
    assert metadata.compiled.slots is not None
    output, _ = batch.run(CompiledBackend, with_lse=False)
    batch.check(output)


def test_a_cpu_has_sinks_and_lse_without_compilation() -> None:
    batch = LONG.with_fields(has_sinks=True).build()
    batch.check(*batch.run(CompiledBackend))
    output, _ = batch.run(CompiledBackend, with_lse=False)
    batch.check(output)


def _visited(plan: PagedPlan, tile: int) -> dict[int, int]:
    """Return place on the axis -> absolute position, for all keys that a tile visits."""
    size, count = plan.page_size, int(plan.num_pages[tile])
    pages = plan.pages[tile, 0, 0, :count].tolist()
    places = [page * size + offset for page in pages for offset in range(size)]
    return {place: int(plan.positions[place // plan.step]) + place % plan.step for place in places}


def test_tiles_visit_the_pages_of_their_own_request() -> None:
    """Two query rows per tile, a window of 20 keys: which of the cache's pages, and where."""
    case = LONG.with_fields(num_heads=60, query_lens=(1, 4), seq_lens=(48, 39), window=(19, 0))
    batch = with_table(case, SHARED_PREFIX)
    _, metadata = impl_and_metadata(batch, CompiledBackend)
    plan = metadata.compiled
    assert plan is not None
    assert plan.rows.num_rows == 2
    assert plan.step == 32  # K and V of a block of 16 lie side by side
    assert plan.num_pages.flatten().tolist() == [2, 2, 2, 0]
    # Position 47 sees 28 to 47: columns 1 and 2, blocks 0 and 1.
    first = _visited(plan, 0)
    assert first == {**{i: 16 + i for i in range(16)}, **{32 + i: 32 + i for i in range(16)}}
    # Positions 35 and 36 see 16 to 36: columns 1 and 2, blocks 0 and 2.
    second = _visited(plan, 1)
    assert second == {**{i: 16 + i for i in range(16)}, **{64 + i: 32 + i for i in range(16)}}
    assert plan.rows.served.tolist() == [0, 1, 2, 3, 4]
    assert plan.rows.rows.tolist()[:6] == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 8},
        {"kv_cache_dtype": "bfloat16"},
        {"block_padding": 3},
    ],
    ids=str,
)
def test_what_cannot_be_read_in_place_is_gathered(changes: dict[str, Any]) -> None:
    _, metadata = impl_and_metadata(LONG.with_fields(**changes).build(), CompiledBackend)
    assert metadata.compiled is not None
    assert metadata.compiled.slots is not None


def test_padded_blocks_a_whole_number_apart_are_read_in_place() -> None:
    padding = LONG.block_size * LONG.num_kv_heads * LONG.head_size
    _, metadata = impl_and_metadata(
        LONG.with_fields(block_padding=padding).build(), CompiledBackend
    )
    assert metadata.compiled is not None
    assert metadata.compiled.slots is None
    assert metadata.compiled.step == 48


def test_a_plan_is_for_the_strides_that_the_spec_promises() -> None:
    batch = LONG.build()
    impl, metadata = impl_and_metadata(batch, CompiledBackend)
    assert batch.kv_cache is not None
    num_blocks, *block = batch.kv_cache.shape
    wider = batch.kv_cache.new_zeros(num_blocks, 2, *block)[:, 0]
    with pytest.raises(InvalidInputError, match=r"key strides in kv_cache.*32 tokens apart"):
        impl.forward(batch.layer, batch.query, None, None, wider, metadata)


def test_gathered_keys_have_a_limit_where_offsets_are_32_bit() -> None:
    spec = replace(MIXED.build().spec, num_kv_heads=32, num_heads=32, head_size=512)
    spans = [Span(request=0, query_start=0, query_len=1, position=2**17 - 1, key_len=2**17)]
    with pytest.raises(MetadataError, match=r"keys to gather.*fewer than 131072.*32-bit"):
        plan_paged(spans, None, Visibility(), spec, torch.device("meta"))
