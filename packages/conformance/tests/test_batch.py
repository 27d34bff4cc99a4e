from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_conformance._caches import differing_blocks
from attn_conformance.batch import make_batch
from attn_conformance.case import Case
from attn_shared.request import AttentionType

CASE = Case(name="c", query_lens=(1, 5), seq_lens=(9, 5), num_padding_rows=2)


def test_a_case_makes_the_same_tensors_every_time_and_another_seed_others() -> None:
    first, again = make_batch(CASE), make_batch(CASE)
    other = make_batch(CASE.with_fields(seed=1))
    assert torch.equal(first.query.nan_to_num(), again.query.nan_to_num())
    assert not torch.equal(first.query.nan_to_num(), other.query.nan_to_num())


def test_rows_of_padding_are_nan_in_all_three() -> None:
    batch = make_batch(CASE)
    assert batch.key is not None
    assert batch.value is not None
    for rows in (batch.query, batch.key, batch.value):
        assert rows.shape[0] == 8
        assert bool(rows[:6].isfinite().all())
        assert bool(rows[6:].isnan().all())


def test_the_new_tokens_are_missing_until_they_are_written() -> None:
    batch = make_batch(CASE)
    assert batch.kv_cache is not None
    assert batch.written_cache is not None
    assert batch.placement is not None
    missing = {slot // 4 for slot in batch.placement.new_slots}
    found = differing_blocks(batch.kv_cache, batch.written_cache, batch.placement)
    assert set(found) == missing


def test_what_is_read_alone_is_complete_and_comes_without_keys() -> None:
    batch = make_batch(CASE.with_fields(writes=False))
    assert batch.key is None
    assert batch.value is None
    assert batch.common.slot_mapping is None
    assert batch.kv_cache is not None
    assert batch.written_cache is not None
    assert batch.placement is not None
    assert differing_blocks(batch.kv_cache, batch.written_cache, batch.placement) == []


def test_the_answer_is_finite_where_rows_hold_tokens() -> None:
    exact, eager = make_batch(CASE).expected()
    assert exact.output.dtype is torch.float64
    assert bool(exact.output[:6].isfinite().all())
    assert bool(eager.output[:6].isfinite().all())


@pytest.mark.parametrize("fields", [{"layout": "HND"}, {"block_padding": 8, "has_sinks": True}])
def test_in_host_memory_it_is_the_same_batch(fields: dict[str, Any]) -> None:
    batch = make_batch(CASE.with_fields(**fields))
    host = batch.on_host()
    assert batch.kv_cache is not None
    assert host.kv_cache is not None
    assert host.kv_cache.stride() == batch.kv_cache.stride()
    ours, theirs = batch.expected()[0], host.expected()[0]
    assert torch.equal(ours.output[:6], theirs.output[:6])
    assert torch.equal(ours.lse[:, :6], theirs.lse[:, :6])


def test_one_key_is_its_own_answer() -> None:
    """A single token attends to itself: the output is its value, the LSE scale * q.k."""
    batch = make_batch(
        Case(name="c", query_lens=(1,), seq_lens=(1,), num_heads=1, num_kv_heads=1, scale=0.5)
    )
    exact, _ = batch.expected()
    assert batch.key is not None
    assert batch.value is not None
    assert torch.allclose(exact.output[0], batch.value[0].double())
    logit = 0.5 * (batch.query[0, 0].double() @ batch.key[0, 0].double())
    assert exact.lse[0, 0].item() == pytest.approx(logit.item())


def test_fresh_tokens_differ_from_stored_ones_in_a_quantised_cache_only() -> None:
    plain, fp8 = make_batch(CASE), make_batch(CASE.with_fields(kv_cache_dtype="fp8"))
    for batch, is_same in ((plain, True), (fp8, False)):
        stored, _ = batch.expected()
        fresh, _ = batch.expected(reads_fresh_kv=True)
        assert torch.equal(stored.output[:6], fresh.output[:6]) is is_same


def test_cross_attention_has_the_encoders_lengths_and_slots() -> None:
    batch = make_batch(Case(name="c", query_lens=(2, 3), seq_lens=(7, 4), attn_type=_CROSS))
    common = batch.common
    assert common.encoder_seq_lens is not None
    assert common.encoder_seq_lens.tolist() == [7, 4]
    assert common.seq_lens.tolist() == [5, 6]
    assert common.slot_mapping is not None
    assert len(common.slot_mapping) == 11
    assert common.causal is False


_CROSS = AttentionType.ENCODER_DECODER


def test_encoders_bring_their_keys() -> None:
    batch = make_batch(
        Case(name="c", query_lens=(2, 3), seq_lens=(4, 1), attn_type=AttentionType.ENCODER)
    )
    assert batch.kv_cache is None
    assert batch.key is not None
    assert len(batch.key) == 5
    assert batch.common.key_start_loc is not None
    assert batch.common.key_start_loc.tolist() == [0, 4, 5]


def test_slack_makes_upper_bounds_on_the_host_alone() -> None:
    common = make_batch(CASE.with_fields(seq_lens_slack=4)).common
    assert common.seq_lens.tolist() == [9, 5]
    assert common.seq_lens_cpu is not None
    assert common.seq_lens_cpu.tolist() == [13, 9]
    assert not common.seq_lens_cpu_is_exact
    assert common.max_seq_len == 13


def test_scales_per_head_become_tensors_and_numbers_stay_numbers() -> None:
    batch = make_batch(CASE.with_fields(kv_cache_dtype="fp8", k_scale=(0.5, 2.0), v_scale=4.0))
    assert isinstance(batch.layer.k_scale, torch.Tensor)
    assert batch.layer.k_scale.tolist() == [0.5, 2.0]
    assert batch.layer.v_scale == 4.0


def test_sinks_weigh_about_as_much_as_the_keys() -> None:
    case = CASE.with_fields(has_sinks=True, num_heads=32, seq_lens=(500, 300))
    sinks = make_batch(case).layer.sinks
    assert sinks is not None
    assert abs(float(sinks.mean()) - 6.2) < 1  # log(501)
