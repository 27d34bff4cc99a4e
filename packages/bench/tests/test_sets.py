from __future__ import annotations

import pytest

from attn_bench.sets import SETS, workload_set
from attn_bench.workloads import Workload
from attn_shared.errors import UnknownNameError


def test_sets_come_in_order_and_each_workload_once() -> None:
    decode, full = SETS["decode"], SETS["full"]
    assert workload_set(["decode", "full"]) == full
    assert full[: len(decode)] == decode
    assert len(set(full)) == len(full)


def test_decode_set_by_hand() -> None:
    lengths = [(w.batch, w.context, w.query_len) for w in SETS["decode"]]
    assert lengths == [
        (1, 1024, 1), (1, 4096, 1), (8, 1024, 1), (8, 4096, 1), (32, 1024, 1), (32, 4096, 1),
    ]  # fmt: skip


def test_mixed_workloads_put_decodes_first() -> None:
    first = SETS["mixed"][0]
    assert first.query_lens == (1, 1, 1, 1, 1, 1, 256, 512)
    assert first.seq_lens == (682, 1365, 2048, 2730, 3413, 4096, 256, 512)


def test_an_unknown_set_comes_with_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown workload 'decod'.*long-decode.*decode"):
        workload_set(["decod"])


def test_the_batches_that_the_gpu_targets_are_stated_for() -> None:
    uniform = [(w.batch, w.context) for w in SETS["h200-decode"][:9]]
    assert uniform == [
        (1, 1024), (1, 8192), (32, 1024), (32, 4096), (64, 4096), (128, 2048), (256, 1024),
        (8, 32768), (2, 131072),
    ]  # fmt: skip
    spread, lopsided = SETS["h200-decode"][9:]
    assert (spread.batch, min(spread.seq_lens), max(spread.seq_lens)) == (48, 100, 8000)
    assert len(set(spread.seq_lens)) == 48
    assert sorted(lopsided.seq_lens) == [500] * 15 + [60000]


def test_the_shapes_that_the_gpu_targets_are_stated_for() -> None:
    shapes = SETS["h200-shapes"]
    assert {w.heads.head_size for w in shapes} == {64, 96, 128, 256}
    assert {w.heads.num_heads // w.heads.num_kv_heads for w in shapes} == {1, 4, 16}
    assert {w.block_size for w in shapes} == {16, 64}
    assert {w.kv_cache_dtype for w in shapes} == {"auto", "fp8"}
    assert {w.query_len for w in shapes} == {1, 4}
    assert {w.window for w in shapes} == {None, 1024}
    assert {w.returns_lse for w in shapes} == {False, True}


def test_prefill_after_thirty_thousand_tokens() -> None:
    (chunk,) = [w for w in SETS["h200-prefill"] if w.query_len != w.context and w.batch == 1]
    assert chunk.lengths == ((2048, 32048),)


def test_the_same_batches_into_the_calls_own_output() -> None:
    own = SETS["h200-own-output"]
    given = [w for name in ("h200-decode", "h200-shapes", "h200-prefill") for w in SETS[name]]
    assert [w.with_fields(own_output=False) for w in own] == given
    assert all(w.own_output for w in own)


def test_outputs_of_both_kinds_of_the_same_batches() -> None:
    both = SETS["h200-output"]
    given, own = both[: len(both) // 2], both[len(both) // 2 :]
    assert [w.with_fields(own_output=True) for w in given] == list(own)
    assert not any(w.own_output for w in given)


@pytest.mark.parametrize("name", SETS)
def test_no_two_workloads_of_a_set_read_alike(name: str) -> None:
    def words(workload: Workload) -> str:
        return workload.name

    assert len(set(map(words, SETS[name]))) == len(SETS[name])


def test_the_batches_that_the_cpu_targets_are_stated_for() -> None:
    names = {workload.name for workload in workload_set(["cpu-decode", "cpu-decode-large"])}
    expected = {
        f"decode {batch}x{context} {heads} {dtype}"
        for batch in (1, 8, 32)
        for context in (1024, 4096, 16384)
        for heads in ("32/8x128", "9/3x64")
        for dtype in ("bfloat16", "float32")
    }
    assert names == expected - {"decode 32x16384 32/8x128 float32"}


def test_the_shapes_that_the_cpu_targets_are_stated_for() -> None:
    shapes = workload_set(["cpu-shapes"])
    assert all(workload.block_size == 128 for workload in shapes)
    assert {str(workload.heads) for workload in shapes if workload.kv_cache_dtype == "fp8"} == {
        *("32/8x128", "9/3x64")
    }
    assert {str(workload.heads) for workload in shapes if workload.kv_cache_dtype == "auto"} == {
        *("32/8x96", "32/8x192", "32/8x256", "8/8x128", "32/4x128")
    }


def test_the_prefills_that_the_cpu_targets_are_stated_for() -> None:
    prefills = workload_set(["cpu-prefill"])
    assert all(workload.block_size == 128 for workload in prefills)
    layers = {(workload.heads, workload.dtype) for workload in prefills}
    assert len(layers) == 4
    for heads, dtype in layers:
        own = [w for w in prefills if (w.heads, w.dtype) == (heads, dtype)]
        *uniform, mixed = own
        assert [w.lengths for w in uniform] == [
            *(((length, length),) for length in (512, 2048, 4096)),
            ((512, 4096),),
        ]
        decodes, prompts = mixed.lengths[:6], mixed.lengths[6:]
        assert {query_len for query_len, _ in decodes} == {1}
        assert (min(decodes)[1], max(decodes)[1]) == (150, 4096)
        assert prompts == ((256, 256), (512, 1536))


def test_the_shapes_of_prefill_that_the_cpu_targets_are_stated_for() -> None:
    shapes = workload_set(["cpu-prefill-shapes"])
    assert {workload.lengths for workload in shapes} == {((2048, 2048),)}
    assert {workload.window for workload in shapes} == {None, 1024}
    assert {str(workload.heads) for workload in shapes if workload.kv_cache_dtype == "fp8"} == {
        *("32/8x128", "9/3x64")
    }
    assert {workload.heads.head_size for workload in shapes} == {64, 96, 128, 192, 256}
    latents = workload_set(["cpu-mla-prefill"])
    assert {str(workload.heads) for workload in latents} == {"16/16x192:128"}


def test_mixed_batches_and_prompts_that_the_gpu_targets_are_stated_for() -> None:
    first = SETS["h200-mixed"][0]
    assert first.lengths == ((1, 4096),) * 64 + ((2048, 2048),)
    ragged = SETS["h200-prompts"][0]
    assert (ragged.batch, min(ragged.query_lens), max(ragged.query_lens)) == (16, 40, 4000)
    assert all(w.query_lens == w.seq_lens for w in SETS["h200-prompts"] if w.block_size == 16)
