"""What backends over latents say of their decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_metadata import MLAQuerySupport
from attn_shared.mla_paths import decode_path, heads_because
from attn_shared.request import AttentionRequest, MLADims


def latent_request(**fields: Any) -> AttentionRequest:
    plain = {"num_heads": 16, "num_kv_heads": 1, "head_size": 576, "mla": MLADims()}
    return AttentionRequest(**{**plain, **fields})


def builder(support: MLAQuerySupport, threshold: int, limit: int | None) -> Any:
    fields = {"query_support": support, "decode_threshold": threshold, "max_query_len": limit}
    return type("Builder", (MLAMetadataBuilder,), fields)


SINGLE, UNIFORM, VARLEN = MLAQuerySupport


@pytest.mark.parametrize(
    ("support", "threshold", "limit", "words"),
    [
        (SINGLE, 1, None, "requests of one query token"),
        (UNIFORM, 1, 4, "one query token, or of one and its drafts, all of one length"),
        (UNIFORM, 128, None, "up to 128 query tokens, all of one length"),
        (VARLEN, 8, None, "up to 8 query tokens"),
    ],
)
def test_which_rows_decode(
    support: MLAQuerySupport, threshold: int, limit: int | None, words: str
) -> None:
    path = decode_path(builder(support, threshold, limit), "a kernel", "because")
    assert (path.rows, path.kernel) == ("decodes", "a kernel")
    assert path.why.startswith("because; ")
    assert path.why.endswith(words)


@pytest.mark.parametrize(
    ("drafts", "is_sharded", "most"), [(0, False, 2), (3, False, 4), (9, False, 6), (0, True, 6)]
)
def test_drafts_raise_the_threshold_up_to_what_the_kernel_takes(
    drafts: int, is_sharded: bool, most: int
) -> None:
    found = builder(UNIFORM, 2, 6).most_decode_tokens(drafts=drafts, is_sharded=is_sharded)
    assert found == most
    assert builder(SINGLE, 1, None).most_decode_tokens(drafts=drafts, is_sharded=is_sharded) == 1


def test_heads_of_a_kernel() -> None:
    request = latent_request(num_heads=8, dtype=torch.bfloat16)
    assert heads_because(request, (16, 128)) == "8 heads, padded to the kernel's 16"
    assert heads_because(request, (8,)) == "8 heads, as the kernel has"
