from __future__ import annotations

import pytest
import torch

from attn_shared.errors import UnsupportedOptionError
from attn_shared.mla_heads import head_count_objection, kernel_heads, padded_heads


@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_heads_are_repeated_and_the_first_are_the_callers(count: int) -> None:
    query = torch.randn(5, count, 6)
    padded = padded_heads(query, 16)
    assert padded.shape == (5, 16, 6)
    assert torch.equal(padded[:, :count], query)
    assert all(torch.equal(padded[:, i], query[:, i % count]) for i in range(16))


def test_nothing_is_copied_where_the_count_fits() -> None:
    query = torch.randn(2, 16, 4)
    assert padded_heads(query, 16) is query


@pytest.mark.parametrize(("count", "expected"), [(8, 16), (16, 16), (17, 128), (128, 128)])
def test_the_smallest_count_that_holds_them(count: int, expected: int) -> None:
    assert kernel_heads(count, (128, 16)) == expected
    assert head_count_objection(count, (16, 128)) is None


def test_too_many_heads_are_refused_with_the_value_and_what_is_allowed() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"num_heads=129 .*16 or 128.*at most 128"):
        kernel_heads(129, (16, 128))
    with pytest.raises(UnsupportedOptionError, match="num_heads=17"):
        padded_heads(torch.zeros(1, 17, 4), 16)
    reason = head_count_objection(129, (16, 128))
    assert reason is not None
    assert (reason.code, reason.value) == ("num_heads", "129")
