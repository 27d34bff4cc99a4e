"""Requests without keys: what FlashAttention 2 gets for them, and what becomes of their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_testing import common_of, layer_object, layer_spec, stubbed

from attn_conformance.stubs.recorder import Recorder
from attn_cuda._fa_keyless import with_keys
from attn_cuda._fa_metadata import FlashAttnMetadata, FlashAttnMetadataBuilder
from attn_cuda._fa_step import KeyStep
from attn_cuda.backends.flash_attn import FlashAttnImpl
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import BuildConfig
from attn_shared.step_buffers import Buffers

CPU = torch.device("cpu")


@pytest.fixture
def second() -> Iterator[Recorder]:
    with stubbed("vllm_flash_attn_2") as (recorder, _):
        yield recorder


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step_of(*, causal: bool) -> KeyStep:
    """Requests of 1, 3 and 2 rows with 17, 0 and 2 keys, in blocks of 2; garbage is not read."""
    table = torch.full((3, 9), -7, dtype=torch.int32)
    table[0], table[2, 0] = torch.arange(9), 4
    return KeyStep(
        query_start_loc=ints(0, 1, 4, 6),
        max_query_len=3,
        max_key_len=17,
        causal=causal,
        key_lens=ints(17, 0, 2),
        block_table=table,
    )


def test_a_request_without_keys_gets_one_of_block_0() -> None:
    made = with_keys(
        step_of(causal=False), num_tokens=6, block_size=2, buffers=Buffers(CPU, is_kept=False)
    )
    assert made.key_lens is not None
    assert made.block_table is not None
    assert made.keyless is not None
    assert made.key_lens.tolist() == [17, 1, 2]
    assert made.block_table[1].tolist() == [0] * 9
    assert made.block_table[0].tolist() == list(range(9))
    assert made.block_table[2].tolist() == [4] + [-7] * 8
    assert made.keyless.rows.tolist() == [False, True, True, True, False, False]


def test_every_row_of_a_causal_request_gets_a_key() -> None:
    narrow = replace(step_of(causal=True), block_table=torch.zeros(3, 1, dtype=torch.int32))
    narrow = replace(narrow, key_lens=ints(2, 0, 2), max_key_len=2)
    made = with_keys(narrow, num_tokens=6, block_size=2, buffers=Buffers(CPU, is_kept=False))
    assert made.key_lens is not None
    assert made.block_table is not None
    assert made.key_lens.tolist() == [2, 3, 2]
    assert made.block_table.shape == (3, 2)  # 3 keys are in two blocks
    assert made.max_key_len == 3


def test_rows_are_set_whatever_the_kernel_wrote() -> None:
    made = with_keys(
        step_of(causal=False), num_tokens=6, block_size=2, buffers=Buffers(CPU, is_kept=False)
    )
    assert made.keyless is not None
    output, lse = torch.full((6, 1, 2), math.nan), torch.ones(1, 6)
    made.keyless.blank(output, lse)
    assert output[1:4].tolist() == [[[0.0, 0.0]]] * 3
    assert output[[0, 4, 5]].isnan().all()
    assert lse.tolist() == [[1.0, -math.inf, -math.inf, -math.inf, 1.0, 1.0]]
    made.keyless.blank(output, None)


def planned(common: CommonAttentionMetadata, **config: Any) -> FlashAttnMetadata:
    spec = layer_spec()
    builder = FlashAttnMetadataBuilder(
        spec.kv_cache_spec, {"layer": spec}, BuildConfig(**config), CPU
    )
    return builder.build(0, common)


@pytest.mark.parametrize(
    ("seq_lens", "changes", "config", "is_looked_for"),
    [
        ([5, 9], {}, {}, False),
        ([5, 0], {}, {}, True),
        ([0, 0], {}, {}, True),
        ([5, 9], {"seq_lens_cpu": None}, {}, True),
        ([5, 9], {"seq_lens_cpu_is_exact": False}, {}, True),
        ([5, 9], {}, {"capture_sizes": (2,)}, True),
        ([5, 9], {}, {"capture_sizes": (4,)}, False),
    ],
    ids=["none", "one", "all", "no-host-lens", "bounds", "captured", "other-size"],
)
def test_they_are_looked_for_where_the_host_cannot_rule_them_out(
    second: Recorder,
    seq_lens: list[int],
    changes: dict[str, Any],
    config: dict[str, Any],
    is_looked_for: bool,
) -> None:
    common = replace(common_of([1, 1], seq_lens), **changes)
    assert (planned(common, **config).step.keyless is not None) is is_looked_for


def test_other_generations_get_them_as_they_are() -> None:
    with stubbed("vllm_flash_attn_3"):
        common = common_of([1, 1], [5, 0])
        step = planned(common).step
    assert step.keyless is None
    assert step.key_lens is common.seq_lens


def test_what_a_graph_reads_of_them_stays_where_it_is(second: Recorder) -> None:
    spec = layer_spec()
    builder = FlashAttnMetadataBuilder(
        spec.kv_cache_spec, {"layer": spec}, BuildConfig(capture_sizes=(2,)), CPU
    )
    first, common = builder.build(0, common_of([1, 1], [5, 9])).step, common_of([1, 1], [5, 0])
    table = first.block_table
    assert table is not None
    moved = builder.update_block_table(
        builder.build(0, common), common.block_table + 2, ints()
    ).step
    assert first.key_lens is not None
    assert first.keyless is not None
    assert first.key_lens.tolist() == [5, 1]
    assert first.keyless.rows.tolist() == [False, True]
    assert moved.block_table is not None
    assert moved.block_table.tolist() == [[2], [0]]
    assert moved.block_table.data_ptr() != table.data_ptr()


def test_an_output_that_the_kernel_writes_itself_is_set_too(second: Recorder) -> None:
    spec = layer_spec()
    assert spec.kv_cache_spec is not None
    cache = spec.kv_cache_spec.allocate(4, "cpu").fill_(1.0)  # type: ignore[attr-defined]
    query, output = torch.randn(2, 4, 16).bfloat16(), torch.full((2, 4, 16), 7.0).bfloat16()
    metadata = planned(common_of([1, 1], [5, 0]))
    lse = torch.zeros(4, 2)
    impl = FlashAttnImpl(spec)
    impl.forward(layer_object(), query, None, None, cache, metadata, output, lse=lse)
    assert second.calls[-1].arguments["seqused_k"].tolist() == [5, 1]
    assert (output[0] == 1.0).all()
    assert (output[1] == 0.0).all()
    assert (lse[:, 1] == -math.inf).all()
    assert lse[:, 0].isfinite().all()
