"""A batch read on the host, and what is refused there."""

from __future__ import annotations

import pytest
import torch

from attn_shared.errors import MetadataError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType
from attn_torch._batch import HostBatch

DECODER, CROSS = AttentionType.DECODER, AttentionType.ENCODER_DECODER
ENCODER = AttentionType.ENCODER


def _common(query_lens=(1, 3), seq_lens=(5, 3), width=2, **options) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        query_lens=list(query_lens),
        seq_lens=list(seq_lens),
        block_table=torch.zeros(len(query_lens), width, dtype=torch.int32) if width else None,
        **options,
    )


def _int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_a_decoder_batch():
    batch = HostBatch.of(_common(), DECODER, 4)
    assert (batch.query_starts, batch.key_lens) == ([0, 1, 4], [5, 3])
    assert (batch.num_tokens, batch.num_keys) == (4, 0)
    assert batch.is_causal == [True, True]


def test_causality_per_request():
    flags = torch.tensor([True, False])
    batch = HostBatch.of(_common(causal=flags, causal_cpu=flags), DECODER, 4)
    assert batch.is_causal == [True, False]


def test_an_encoder_is_never_causal_and_its_keys_come_with_the_call():
    batch = HostBatch.of(_common(width=0), ENCODER, None)
    assert (batch.key_starts, batch.key_lens, batch.num_keys) == ([0, 1, 4], [1, 3], 4)
    assert batch.is_causal == [False, False]


def test_keys_of_a_call_may_have_lengths_of_their_own():
    starts = _int32(0, 2, 9)
    common = _common(width=0, key_start_loc=starts, key_start_loc_cpu=starts)
    assert HostBatch.of(common, ENCODER, None).key_lens == [2, 7]


def test_cross_attention_reads_the_encoders_lengths():
    lens = _int32(7, 0)
    common = _common(encoder_seq_lens=lens, encoder_seq_lens_cpu=lens)
    batch = HostBatch.of(common, CROSS, 4)
    assert batch.key_lens == [7, 0]
    assert batch.is_causal == [False, False]


def test_ranges_by_request():
    common = _common(mm_prefix_ranges={1: [(0, 1)]})
    assert HostBatch.of(common, DECODER, 4).ranges == [(), [(0, 1)]]


def _refused(common: CommonAttentionMetadata, attn_type: AttentionType, match: str) -> None:
    with pytest.raises(MetadataError, match=match):
        HostBatch.of(common, attn_type, 4)


def test_an_upper_bound_of_lengths_is_refused():
    _refused(_common().with_fields(seq_lens_cpu_is_exact=False), DECODER, "an upper bound")
    _refused(_common().with_fields(seq_lens_cpu=None), DECODER, "missing")


def test_a_length_past_the_table_is_refused():
    _refused(_common(seq_lens=(5, 9)), DECODER, "key length of request 1 is 9; .*at most 8")


def test_a_missing_table_is_refused():
    _refused(_common(width=0), DECODER, "block_table is None")


def test_a_negative_length_is_refused():
    _refused(_common().with_fields(seq_lens_cpu=_int32(5, -1)), DECODER, "lengths >= 0")


def test_falling_sums_are_refused():
    _refused(
        _common().with_fields(query_start_loc_cpu=_int32(0, 5, 4), max_query_len=5),
        DECODER,
        "never fall",
    )
    _refused(_common().with_fields(query_start_loc_cpu=_int32(1, 3, 4)), DECODER, "never fall")


def test_cross_attention_without_the_encoders_lengths_is_refused():
    _refused(_common(), CROSS, "encoder_seq_lens_cpu is None")


def test_ranges_are_refused_for_encoders_and_for_unknown_requests():
    _refused(_common(width=0, mm_prefix_ranges={0: [(0, 1)]}), ENCODER, "none with attn_type")
    _refused(_common(mm_prefix_ranges={2: [(0, 1)]}), DECODER, r"keyed by \[2\].*below 2")
