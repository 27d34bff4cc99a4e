from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_stand_in import batch

from attn_shared.checked import check_metadata
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_vllm.batches import common_of


def common(source: Any, **changes: Any) -> Any:
    return common_of(source, **{"block_size": 4, "has_exact_lengths": True, **changes})


def test_padding_is_not_counted() -> None:
    found = common(batch([1, 3], [6, 3], block_size=4, padding=4))
    assert found.num_actual_tokens == 4
    assert len(found.slot_mapping) == 8
    check_metadata(found)


def test_padded_rows_end_the_batch() -> None:
    source = batch([1, 1], [6, 3], block_size=4)
    source.num_reqs = 2
    source.query_start_loc_cpu = source.query_start_loc = torch.tensor([0, 1, 2, 2, 2]).int()
    source.seq_lens = torch.tensor([6, 3, 0, 0]).int()
    source.block_table_tensor = torch.zeros(4, 3, dtype=torch.int32)
    found = common(source)
    assert found.query_start_loc.tolist() == [0, 1, 2]
    assert found.seq_lens.tolist() == [6, 3]
    assert found.block_table.shape == (2, 3)


def test_lengths_on_the_host_are_exact_whoever_drafts() -> None:
    assert common(batch([1], [6], 4), has_exact_lengths=False).seq_lens_cpu_is_exact


def test_ranges_and_prefills_arrive() -> None:
    source = batch([5, 1], [5, 7], block_size=4)
    source.mm_req_doc_ranges = {0: [(1, 3)]}
    source.is_prefilling = torch.tensor([True, False])
    found = common(source)
    assert found.mm_prefix_ranges == {0: [(1, 3)]}
    assert found.is_prefilling.tolist() == [True, False]


def test_causality_per_request_has_a_mirror() -> None:
    source = batch([2, 2], [5, 7], block_size=4)
    source.causal = torch.tensor([1, 0])
    found = common(source)
    assert found.causal.dtype is torch.bool
    assert found.causal_cpu.tolist() == [True, False]


def test_cache_free_attention_has_no_table_and_sees_all() -> None:
    found = common(batch([3, 2], [3, 2], block_size=4), block_size=None)
    assert found.block_table is None
    assert found.slot_mapping is None
    assert found.causal is False


def test_reference_windows_are_refused() -> None:
    source = batch([1], [6], block_size=4)
    source.rswa_prefix_lens = torch.tensor([3])
    with pytest.raises(UnsupportedOptionError, match="rswa"):
        common(source)


def test_a_batch_that_contradicts_itself_is_refused() -> None:
    source = batch([1, 4], [6, 4], block_size=4)
    source.max_query_len = 2
    with pytest.raises(MetadataError, match="max_query_len"):
        common(source)
