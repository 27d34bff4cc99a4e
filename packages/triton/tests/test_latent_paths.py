"""What is said of the kernels over latents is what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.device import preset
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import spec_for
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.spec import LayerSpec
from attn_triton import _latent_calls
from attn_triton.kernel_paths import arch_of
from attn_triton.latent_paths import latent_paths_of
from attn_triton.latent_route import LatentRoute
from attn_triton.latent_tiles import LatentWidths, latent_tile
from attn_triton.machine import Machine

NOTHING = Inventory()


def asked(**fields: Any) -> AttentionRequest:
    dims = fields.pop("mla", MLADims())
    plain: dict[str, Any] = {
        "num_heads": 16,
        "num_kv_heads": 1,
        "head_size": dims.latent_size,
        "head_size_v": dims.kv_lora_rank,
        "mla": dims,
        "dtype": torch.bfloat16,
        "block_size": 64,
    }
    return AttentionRequest(**{**plain, **fields})


def test_rows_of_a_request_choose_the_kernel_on_hopper() -> None:
    few, many = latent_paths_of(asked(), preset("h200"), NOTHING)
    assert few.rows == "decodes of one token"
    assert "descriptors" in few.kernel
    assert many.rows == "decodes of more tokens"
    assert "Gluon" in many.kernel
    assert "up to 8 query tokens" in many.why
    (all_rows,) = latent_paths_of(asked(num_heads=128), preset("h200"), NOTHING)
    assert all_rows.rows == "decodes"


def test_an_invariant_layer_has_one_shape() -> None:
    (path,) = latent_paths_of(asked(batch_invariant=True), preset("h200"), NOTHING)
    assert "descriptors" in path.kernel


def test_small_pages_are_named() -> None:
    (path,) = latent_paths_of(asked(block_size=16), preset("h200"), NOTHING)
    assert "pages of 16 do not hold whole" in path.why
    assert "its own pointer" in path.kernel


CASES = [
    {"num_heads": 16},
    {"num_heads": 128},
    {"num_heads": 128, "block_size": 16},
    {"num_heads": 128, "dtype": torch.float32},
    {"num_heads": 32, "kv_cache_dtype": "fp8"},
    {"num_heads": 128, "mla": MLADims(kv_lora_rank=256, qk_rope_head_dim=64)},
    {"num_heads": 128, "mla": MLADims(kv_lora_rank=508, qk_rope_head_dim=64)},
]


@pytest.mark.interpreter
@pytest.mark.parametrize("device", ["h200", "b200", "a100", "mi300x"])
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_it_is_what_a_layer_launches(
    device: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn_triton.kernels import compiling

    facts, request = preset(device), asked(**fields)
    arch, dims = arch_of(facts), request.mla
    assert dims is not None
    flavour = facts.fp8_dtype or torch.float8_e4m3fn
    cache = spec_for(request, block_size=request.block_size or 1, fp8_e4m3_dtype=flavour)
    spec = LayerSpec.from_request(request, scale=0.1, kv_cache_spec=cache)
    monkeypatch.setattr(
        _latent_calls, "machine_of", lambda _device: Machine(arch=arch, compute_units=8)
    )
    monkeypatch.setattr(compiling, "has_gluon", lambda: True)
    monkeypatch.setattr(_latent_calls.LatentCache, "tiles", lambda *_args: (None, None))
    calls, kv_cache = _latent_calls.LatentCalls(spec), cache.allocate(2, torch.device("cpu"))
    widths = LatentWidths(
        latent=dims.kv_lora_rank,
        rope=dims.qk_rope_head_dim,
        element_bytes=request.dtype.itemsize,
        cache_bytes=kv_cache.dtype.itemsize,
    )
    told = latent_paths_of(request, facts, NOTHING)
    for path, tokens in zip((told[0], told[-1]), (1, 8), strict=True):
        tile = latent_tile(arch, widths, request.num_heads * tokens)
        route, _ = calls._choose(calls._caches.read(kv_cache), kv_cache, tile)
        words = {"rows": "its own pointer", "tiles": "descriptors", "hopper": "Gluon"}
        assert words[LatentRoute(route).value] in path.kernel
