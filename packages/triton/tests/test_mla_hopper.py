"""The kernel for Hopper beside the float64 reference; Gluon has no interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from attn_triton_latents import make
from test_mla_decode import check

from attn_triton.kernels.compiling import has_gluon
from attn_triton.tiles import Tile

pytestmark = [
    pytest.mark.cuda(min_capability=(9, 0)),
    pytest.mark.skipif(not has_gluon(), reason="this Triton has not the Gluon that it is in"),
]
TILE = Tile(rows=64, keys=64, num_warps=8, stages=2)


@pytest.mark.parametrize(
    "batch",
    [
        {"lens": [700, 64, 65, 1, 0, 130], "query_lens": [1] * 6, "heads": 128},
        {"lens": [300, 5, 200], "query_lens": [4, 5, 1], "heads": 32},
        {"lens": [40, 90], "query_lens": [2, 0], "heads": 48},
    ],
    ids=["heads", "tokens", "a request without rows"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page", [64, 128])
def test_it_attends(batch: dict[str, Any], dtype: torch.dtype, page: int) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    from attn_triton.kernels.describing_hopper import described_for_hopper
    from attn_triton.kernels.mla_decode_hopper import mla_decode_hopper

    made = make("cuda", **batch, page=page, dtype=dtype)
    options = {"kernel": mla_decode_hopper, "describe": described_for_hopper}
    check(made, TILE, has_descriptors=True, **options)
    check(made, TILE, has_descriptors=True, causal=False, **options)
