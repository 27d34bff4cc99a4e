from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_cli.model_flags import model_of
from attn_cli.request_flags import RequestFlags
from attn_shared.errors import InvalidInputError, InvalidRequestError
from attn_shared.request import AttentionRequest

CONFIG = {
    "model_type": "mistral",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "sliding_window": 64,
    "max_position_embeddings": 1024,
    "torch_dtype": "float16",
}

PASSED_ON = [
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8"),
    ({"block_size": 48}, "block_size", 48),
    ({"kv_layout": "HND"}, "kv_layout", "HND"),
    ({"per_head_scales": True}, "per_head_quant_scales", True),
    ({"kv_connector": True}, "use_kv_connector", True),
    ({"lse": True}, "needs_lse", True),
    ({"batch_invariant": True}, "batch_invariant", True),
    ({"flash_attn_version": 3}, "flash_attn_version", 3),
    ({"dcp": 2}, "dcp_size", 2),
    ({"pcp": 2}, "pcp_size", 2),
    ({"phase": "decode"}, "phase", "decode"),
    ({"dtype": "bfloat16"}, "dtype", torch.bfloat16),
    ({"tp": 2}, "num_heads", 4),
]

OF_THE_MODEL = [
    {"num_heads": 8},
    {"num_kv_heads": 2},
    {"head_size": 64},
    {"head_size_v": 64},
    {"attn_type": "encoder"},
    {"non_causal": True},
    {"per_request_causal": True},
    {"mm_prefix": True},
    {"window": "64"},
    {"chunk_size": 64},
    {"softcap": 30.0},
    {"sinks": True},
    {"alibi": True},
    {"mla": True},
    {"kv_lora_rank": 512},
    {"qk_nope_head_dim": 128},
    {"qk_rope_head_dim": 64},
    {"v_head_dim": 128},
    {"q_lora_rank": 96},
    {"sparse": True},
    {"index_topk": 2048},
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def request(path: str, **flags: Any) -> AttentionRequest:
    (group,) = model_of(RequestFlags(**flags), path).groups
    assert group.request is not None
    return group.request


@pytest.mark.parametrize(("flags", "field", "value"), PASSED_ON)
def test_a_flag_that_no_model_decides_is_passed_on(
    path: str, flags: Any, field: str, value: object
) -> None:
    assert getattr(request(path, **flags), field) == value


def test_the_models_own_values_are_taken_without_flags(path: str) -> None:
    found = request(path)
    assert (found.num_heads, found.num_kv_heads, found.head_size) == (8, 2, 64)
    assert (found.window, found.dtype) == ((63, 0), torch.float16)


def test_a_greater_length_is_the_callers(path: str) -> None:
    assert model_of(RequestFlags(max_model_len=99), path).max_model_len == 99


@pytest.mark.parametrize("flags", OF_THE_MODEL)
def test_what_the_model_decides_is_refused_beside_it(path: str, flags: Any) -> None:
    (name,) = flags
    option = f"--{name.replace('_', '-')} is given together with --model"
    with pytest.raises(InvalidInputError, match=option):
        request(path, **flags)


def test_every_flag_either_goes_with_a_model_or_is_the_models() -> None:
    known = {name for flags, _, _ in PASSED_ON for name in flags}
    known |= {name for flags in OF_THE_MODEL for name in flags}
    known |= {"device", "model", "backend", "max_model_len", "from_name", "untuned"}
    known |= {"prefer", "avoid"}
    assert {field.name for field in dataclasses.fields(RequestFlags)} <= known


def test_ranks_that_heads_do_not_divide_among(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="tp_size=3"):
        request(path, tp=3)
