"""The default order on CPUs."""

from __future__ import annotations

from attn_cpu.priorities import PRIORITIES


def test_only_backends_that_exist_are_ranked_and_each_says_why() -> None:
    assert {row.name for row in PRIORITIES} == {"CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"}
    assert all("measured" in row.provenance for row in PRIORITIES)
