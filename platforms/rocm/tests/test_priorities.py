"""The default order on AMD GPUs."""

from __future__ import annotations

from attn_rocm.priorities import PRIORITIES


def test_only_backends_that_exist_are_ranked_and_no_measurement_is_claimed() -> None:
    assert {row.name for row in PRIORITIES} == {"TRITON_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"}
    assert all("not measured on this hardware" in row.provenance for row in PRIORITIES)
