"""The default order on Intel GPUs."""

from __future__ import annotations

from attn_xpu.priorities import PRIORITIES


def test_only_backends_that_exist_are_ranked_and_no_measurement_is_claimed() -> None:
    assert {row.name for row in PRIORITIES} == {
        *("XPU_FLASH_ATTN", "TRITON_ATTN", "IPEX", "TORCH_SDPA", "FLEX_ATTENTION")
    }
    assert all("not measured on this hardware" in row.provenance for row in PRIORITIES)
