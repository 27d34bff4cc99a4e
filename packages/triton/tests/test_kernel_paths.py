"""What is told of TRITON_ATTN's kernels is what `_route` decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.device import preset
from attn_shared.request import AttentionRequest
from attn_triton._route import LEAST_TOKENS
from attn_triton.kernel_paths import kernel_paths_of

HALF = torch.bfloat16


def told(device: str = "h200", **changes: Any) -> dict[str, tuple[str, str]]:
    plain: dict[str, Any] = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": HALF,
        "block_size": 16,
    }
    request = AttentionRequest(**{**plain, **changes})
    paths = kernel_paths_of(request, preset(device))
    return {path.rows: (path.kernel, path.why) for path in paths}


def test_small_pages_are_copied_and_large_ones_are_not() -> None:
    small, large = told(), told(block_size=128)
    assert list(small) == [
        "decodes",
        "short prompts",
        "long prompts, all keys new",
        "long prompts after earlier keys",
    ]
    assert f"{LEAST_TOKENS} query tokens" in small["short prompts"][1]
    assert "copied out of pages of 16" in small["long prompts after earlier keys"][1]
    assert large["long prompts after earlier keys"][1] == "whole tiles of keys lie in a page of 128"
    assert "tensors of the call" in large["long prompts, all keys new"][1]


@pytest.mark.parametrize(
    ("device", "changes", "why"),
    [
        ("h200", {"has_alibi": True}, "ALiBi"),
        ("h200", {"dtype": torch.float32}, "have no tile"),
        ("mi300x", {}, "have no tile"),
        ("b60", {}, "on xpu have no tile"),
        ("h200", {"kv_cache_dtype": "int8_per_token_head"}, "a cache of torch.int8"),
        ("h200", {"batch_invariant": True}, "pages that must be copied"),
    ],
)
def test_what_keeps_prompts_on_the_plain_kernel(
    device: str, changes: dict[str, Any], why: str
) -> None:
    found = told(device, **changes)
    assert list(found) == ["decodes", "prompts"]
    kernel, because = found["prompts"]
    assert kernel.startswith("the plain kernel")
    assert why in because


def test_stored_keys_of_fp8_are_not_mixed_with_fresh_ones() -> None:
    found = told(kv_cache_dtype="fp8", block_size=128)
    assert "copied" in found["long prompts, all keys new"][1]


def test_a_batch_invariant_prompt_has_one_way() -> None:
    found = told(batch_invariant=True, block_size=128)
    assert list(found) == ["decodes", "prompts"]
    assert "1 query token per request" in found["decodes"][1]
    assert found["prompts"][0] == "the kernel for long prompts on Hopper"


def test_which_of_the_kernels_for_long_prompts_runs() -> None:
    rows = "long prompts, all keys new"
    assert told()[rows][0] == "the kernel for long prompts on Hopper"
    kernel, why = told(window=(1023, 0))[rows]
    assert kernel == "the kernel for long prompts"
    assert why.endswith("; not that for Hopper: a window")
    kernel, why = told("b200")[rows]
    assert kernel == "the kernel for long prompts"
    assert "Hopper" not in why


def test_without_a_cache_nothing_decodes() -> None:
    assert list(told(attn_type="encoder_only", block_size=None)) == ["short prompts", "prompts"]
