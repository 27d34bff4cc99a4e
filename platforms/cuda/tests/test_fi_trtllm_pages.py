"""FLASHINFER_TRTLLM's refusals of page sizes: the list of its kernels."""

from __future__ import annotations

import pytest
import torch

from attn_cuda.backends.flashinfer_trtllm import FlashInferTrtllmBackend
from attn_shared.device import preset
from attn_shared.inventory import Inventory
from attn_shared.request import AttentionRequest

EVERY = "16, 32, 64, 128, 256, 512, 1024"
OPEN = "leave it open to get 16"
GROUPED = "pages of 128 and more need several query heads per kv head"


@pytest.mark.parametrize(
    ("device", "kv_heads", "size", "allowed", "hint"),
    [
        ("h100", 8, 48, "16, 32, 64, 128", OPEN),
        ("h100", 8, 256, "16, 32, 64, 128", OPEN),
        ("b200", 8, 48, EVERY, OPEN),
        ("b200", 32, 256, "16, 32, 64", GROUPED),
    ],
)
def test_page_sizes(device: str, kv_heads: int, size: int, allowed: str, hint: str) -> None:
    facts = preset(device)
    request = AttentionRequest(
        num_heads=32, num_kv_heads=kv_heads, head_size=128, dtype=torch.bfloat16, block_size=size
    )
    found = FlashInferTrtllmBackend.validate_configuration(request, facts, Inventory())
    (reason,) = (reason for reason in found if reason.code == "block_size")
    assert (reason.value, reason.allowed, reason.hint) == (str(size), allowed, hint)


def test_the_list_says_which_pages_there_are() -> None:
    record = FlashInferTrtllmBackend.capability(preset("h100"), Inventory()).to_dict()
    assert record["block_sizes"] == ["16", "32", "64", "128"]
