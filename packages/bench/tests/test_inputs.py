from __future__ import annotations

import pytest
import torch
from attn_bench_testing import CPU, workload

from attn_bench.inputs import block_table_of, make_step, new_keys_of, stored_keys_of
from attn_bench.workloads import Workload
from attn_shared.kv_cache import AttentionSpec, FullAttentionSpec
from attn_shared.quantization import dequantize_int8_per_token_head


def spec_of(batch: Workload, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> AttentionSpec:
    return FullAttentionSpec(
        block_size=4,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        num_kv_heads=batch.heads.num_kv_heads,
        head_size=batch.heads.head_size,
        head_size_v=batch.heads.head_size,
    )


def test_every_block_belongs_to_one_request() -> None:
    table, num_blocks = block_table_of(workload((1, 1), (5, 9)), 4, seed=0)
    assert num_blocks == 2 + 3
    assert sorted([*table[0, :2].tolist(), *table[1].tolist()]) == [0, 1, 2, 3, 4]


def test_whole_blocks_of_the_prefix_are_shared() -> None:
    table, num_blocks = block_table_of(workload((1, 1), (12, 15), shared_prefix_len=10), 4, seed=0)
    assert table[0, :2].tolist() == table[1, :2].tolist()
    assert num_blocks == 2 + 1 + 2
    assert table[0, 2] not in table[1]


def test_blocks_are_shuffled() -> None:
    table, num_blocks = block_table_of(workload((1,), (400,)), 4, seed=0)
    assert num_blocks == 100
    assert table[0].tolist() != list(range(100))


def test_layers_share_the_batch_and_nothing_else() -> None:
    batch = workload()
    step = make_step(batch, spec_of(batch, torch.float32), CPU, 2)
    first, second = step.layers
    assert not torch.equal(first.query, second.query)
    assert not torch.equal(first.kv_cache, second.kv_cache)
    assert first.query.shape == (2, 4, 8)
    assert first.output.isnan().all()
    assert step.common.seq_lens.tolist() == [5, 9]
    again = make_step(batch, spec_of(batch, torch.float32), CPU, 2)
    assert torch.equal(again.layers[1].kv_cache, second.kv_cache)


def test_stored_keys_are_those_that_the_table_names() -> None:
    batch = workload((1, 1), (5, 9))
    spec = spec_of(batch, torch.float32)
    step = make_step(batch, spec, CPU, 1)
    layer = step.layers[0]
    keys = stored_keys_of(step, layer, 1, 9)
    views = spec.split(layer.kv_cache)
    assert keys.key.shape == (9, 2, 8)
    assert step.common.block_table is not None
    block = int(step.common.block_table[1, 2])
    assert torch.equal(keys.key[8], views.key[block, 0])
    assert torch.equal(keys.value[8], views.value[block, 0])
    assert keys.key_scale is None


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "fp8"])
def test_quantised_caches_hold_numbers_of_ordinary_size(kv_cache_dtype: str) -> None:
    batch = workload((1,), (64,), kv_cache_dtype=kv_cache_dtype)
    storage = torch.int8 if kv_cache_dtype.startswith("int8") else torch.float8_e4m3fn
    spec = spec_of(batch, storage, kv_cache_dtype)
    step = make_step(batch, spec, CPU, 1)
    keys = stored_keys_of(step, step.layers[0], 0, 64)
    value = keys.value.float()
    if keys.value_scale is not None:
        value = dequantize_int8_per_token_head(keys.value, keys.value_scale)
    assert value.isfinite().all()
    assert 0.9 < float(value.std()) < 1.1


def test_the_steps_keys_are_what_the_cache_holds_of_them() -> None:
    batch = workload((1, 3), (5, 9))
    step = make_step(batch, spec_of(batch, torch.float32), CPU, 1)
    key, value = new_keys_of(step, step.layers[0])
    assert key is not None
    assert value is not None
    stored = [stored_keys_of(step, step.layers[0], i, n) for i, n in enumerate((5, 9))]
    assert torch.equal(key, torch.cat([stored[0].key[4:], stored[1].key[6:]]))
    assert torch.equal(value, torch.cat([stored[0].value[4:], stored[1].value[6:]]))


def test_a_quantised_cache_does_not_tell_the_steps_keys() -> None:
    batch = workload((2,), (5,))
    spec = spec_of(batch, torch.float8_e4m3fn, "fp8")
    step = make_step(batch, spec, CPU, 1)
    assert new_keys_of(step, step.layers[0]) == (None, None)
