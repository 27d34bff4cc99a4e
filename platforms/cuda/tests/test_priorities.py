"""The default order on NVIDIA GPUs."""

from __future__ import annotations

from attn_cuda.priorities import PRIORITIES


def test_only_backends_that_exist_are_ranked_and_no_measurement_is_claimed() -> None:
    ranked = {row.name for row in PRIORITIES if row.priority is not None}
    assert ranked == {"FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"}
    assert {row.name for row in PRIORITIES} - ranked == {"FLASH_ATTN_DIFFKV"}
    rows = [row for row in PRIORITIES if row.priority is not None]
    assert all("not measured on this hardware" in row.provenance for row in rows)
