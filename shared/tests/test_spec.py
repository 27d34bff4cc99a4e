from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_shared_fakes import request

from attn_shared.errors import InvalidRequestError, UnsupportedOptionError
from attn_shared.kv_cache import spec_for
from attn_shared.request import MLADims
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform


def layer(**options: Any) -> LayerSpec:
    return LayerSpec.from_request(request(**options), scale=0.125)


def test_a_layer_is_what_its_request_said() -> None:
    asked = request(
        dtype="float16",
        head_size_v=32,
        window=(127, 0),
        chunk_size=512,
        softcap=30.0,
        has_sinks=True,
        has_alibi=True,
        attn_type="encoder_decoder",
        batch_invariant=True,
        dcp_size=4,
        pcp_size=2,
    )
    cache = spec_for(asked, block_size=16)
    found = LayerSpec.from_request(
        asked,
        scale=0.5,
        kv_cache_spec=cache,
        kv_sharing_target="layer.0",
        dcp_rank=3,
        dcp_interleave=64,
        pcp_rank=1,
    )
    assert found == LayerSpec(
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        head_size_v=32,
        scale=0.5,
        dtype=torch.float16,
        kv_cache_spec=cache,
        window=(127, 0),
        chunk_size=512,
        softcap=30.0,
        has_sinks=True,
        has_alibi=True,
        attn_type=asked.attn_type,
        kv_sharing_target="layer.0",
        batch_invariant=True,
        dcp_rank=3,
        dcp_size=4,
        dcp_interleave=64,
        pcp_rank=1,
        pcp_size=2,
    )
    assert found.queries_per_kv == 4


def test_a_layer_of_latents_has_values_as_wide_as_the_latent() -> None:
    found = layer(mla=MLADims(), num_kv_heads=1, head_size=576)
    assert (found.head_size, found.head_size_v, found.mla) == (576, 512, MLADims())


@pytest.mark.parametrize(
    "scale", [float("nan"), float("inf"), torch.tensor(0.5), "a", True, 1e39, -1e39, 10**400]
)
def test_a_scale_is_a_finite_number(scale: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"scale=.* allowed: a finite number"):
        LayerSpec.from_request(request(), scale=scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dcp_rank": 2}, "dcp_rank=2 is not allowed; allowed: 0 to 1"),
        ({"dcp_rank": -1}, "dcp_rank=-1 is not allowed; allowed: 0 to 1"),
        ({"pcp_rank": 1}, "pcp_rank=1 is not allowed; allowed: 0 to 0"),
        ({"dcp_interleave": 0}, "dcp_interleave=0 is not allowed"),
    ],
)
def test_a_rank_is_inside_its_group(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LayerSpec.from_request(request(dcp_size=2), scale=0.125, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 .*int >= 1"),
        ({"max_num_tokens": -1}, "max_num_tokens=-1 .*int >= 1"),
        ({"max_model_len": 1.5}, "max_model_len=1.5 .*int >= 1"),
        ({"num_spec_tokens": -1}, "num_spec_tokens=-1 .*int >= 1"),
        ({"capture_sizes": (8, 0)}, "capture_sizes=0 .*int >= 1"),
    ],
)
def test_bounds_of_batches_are_positive(options: dict[str, Any], message: str) -> None:
    BuildConfig(num_spec_tokens=3, capture_sizes=(1, 8))
    with pytest.raises(InvalidRequestError, match=message):
        BuildConfig(**options)


def test_layers_that_agree_share_a_plan() -> None:
    first = layer(window=(127, 0))
    group = {"layer.0": first, "layer.2": layer(window=(127, 0), has_sinks=True)}
    assert require_uniform(group, ["num_heads", "window"]) is first


def test_layers_that_disagree_are_named_with_their_values() -> None:
    group = {"layer.0": layer(window=(127, 0)), "layer.1": layer(), "layer.2": layer()}
    with pytest.raises(UnsupportedOptionError) as caught:
        require_uniform(group, ["num_heads", "window"])
    assert "must agree on window: layer.0 has (127, 0), layer.1 has (None, None)." in str(
        caught.value
    )


def test_a_group_has_a_layer() -> None:
    with pytest.raises(InvalidRequestError, match=r"layers=\{\} .* at least one layer"):
        require_uniform({}, ["window"])
