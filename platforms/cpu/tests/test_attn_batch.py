from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_cpu._attn_batch import HostBatch, usable_table
from attn_shared.errors import MetadataError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType

TABLE = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
DECODER, ENCODER = AttentionType.DECODER, AttentionType.ENCODER
CROSS = AttentionType.ENCODER_DECODER


def common(**options: Any) -> CommonAttentionMetadata:
    values = {"query_lens": [1, 3], "seq_lens": [6, 3], "block_table": TABLE} | options
    return CommonAttentionMetadata.from_lengths(**values)


def test_a_decoder() -> None:
    batch = HostBatch.of(common(), DECODER, 4)
    assert batch.query_start_loc.tolist() == [0, 1, 4]
    assert batch.key_lens.tolist() == [6, 3]
    assert batch.key_start_loc is None
    assert (batch.is_causal, batch.causal_per_request, batch.ranges) == (True, None, None)
    assert (batch.num_tokens, batch.num_keys) == (4, 0)


def test_upper_bounds_on_the_host_do_no_harm() -> None:
    loose = common().with_fields(
        seq_lens_cpu=torch.tensor([60, 30], dtype=torch.int32),
        seq_lens_cpu_is_exact=False,
        max_seq_len=60,
    )
    assert HostBatch.of(loose, DECODER, 4).key_lens.tolist() == [6, 3]


def test_causality_of_each_request() -> None:
    flags = torch.tensor([True, False])
    batch = HostBatch.of(common(causal=flags, causal_cpu=flags), DECODER, 4)
    assert batch.causal_per_request is not None
    assert batch.causal_per_request.tolist() == [True, False]


def test_encoders_see_all_and_bring_their_keys() -> None:
    starts = torch.tensor([0, 2, 7], dtype=torch.int32)
    batch = HostBatch.of(
        common(block_table=None, key_start_loc=starts, key_start_loc_cpu=starts), ENCODER, None
    )
    assert batch.key_lens.tolist() == [2, 5]
    assert (batch.is_causal, batch.num_keys, batch.block_table) == (False, 7, None)
    same = HostBatch.of(common(block_table=None), ENCODER, None)
    assert same.key_lens.tolist() == [1, 3]


def test_cross_attention_reads_the_encoders_lengths() -> None:
    lens = torch.tensor([8, 1], dtype=torch.int32)
    batch = HostBatch.of(common(encoder_seq_lens=lens, encoder_seq_lens_cpu=lens), CROSS, 4)
    assert batch.key_lens.tolist() == [8, 1]
    assert not batch.is_causal
    with pytest.raises(MetadataError, match="encoder_seq_lens is None"):
        HostBatch.of(common(), CROSS, 4)


def test_ranges_become_rows() -> None:
    batch = HostBatch.of(common(mm_prefix_ranges={1: [(0, 2)], 0: [(1, 2), (4, 5)]}), DECODER, 4)
    assert batch.ranges is not None
    assert batch.ranges.tolist() == [[1, 0, 2], [0, 1, 2], [0, 4, 5]]


@pytest.mark.parametrize(
    ("given", "words"),
    [({2: [(0, 1)]}, "keyed by 2.*below 2"), ({0: [(3, 1)]}, r"\(3, 1\).*start <= end")],
)
def test_ranges_that_are_none(given: dict[int, list[tuple[int, int]]], words: str) -> None:
    with pytest.raises(MetadataError, match=words):
        HostBatch.of(common(mm_prefix_ranges=given), DECODER, 4)


def test_ranges_are_a_decoders() -> None:
    lens = torch.tensor([8, 1], dtype=torch.int32)
    options = {"encoder_seq_lens": lens, "encoder_seq_lens_cpu": lens}
    with pytest.raises(MetadataError, match="none with attn_type=encoder_decoder"):
        HostBatch.of(common(mm_prefix_ranges={0: [(0, 1)]}, **options), CROSS, 4)


def test_lengths_that_contradict_each_other() -> None:
    falling = torch.tensor([0, 3, 4], dtype=torch.int32)
    batch = common().with_fields(query_start_loc=torch.tensor([0, 5, 4], dtype=torch.int32))
    with pytest.raises(MetadataError, match=r"query_start_loc is \[0, 5, 4\].*never fall"):
        HostBatch.of(batch, DECODER, 4)
    assert HostBatch.of(common().with_fields(query_start_loc=falling), DECODER, 4)


def test_negative_lengths() -> None:
    batch = common().with_fields(seq_lens=torch.tensor([6, -1], dtype=torch.int32))
    with pytest.raises(MetadataError, match=r"seq_lens is \[6, -1\]; allowed: lengths >= 0"):
        HostBatch.of(batch, DECODER, 4)


def test_a_table_that_is_too_narrow() -> None:
    with pytest.raises(MetadataError, match="key length of request 0 is 6; allowed: at most 4"):
        HostBatch.of(common(), DECODER, 2)


def test_rows_of_a_table_are_made_dense() -> None:
    wide = torch.arange(8, dtype=torch.int32).reshape(2, 4)[:, ::2]
    table = usable_table(wide, torch.tensor([3, 3]), 4)
    assert table.is_contiguous()
    assert table.tolist() == [[0, 2], [4, 6]]
    with pytest.raises(MetadataError, match=r"block_table shape is \(2, 4\); allowed: \(3, M\)"):
        usable_table(torch.zeros(2, 4, dtype=torch.int32), torch.tensor([1, 1, 1]), 4)
