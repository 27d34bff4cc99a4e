from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch

from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidRequestError, UnknownNameError
from attn_shared.request import (
    AttentionRequest,
    AttentionType,
    MLADims,
    Phase,
    check_softcap,
    check_window,
    window_of,
)


def request(**options: Any) -> AttentionRequest:
    return AttentionRequest(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 64, **options})


@pytest.mark.parametrize(
    ("size", "causal", "window"),
    [
        (1, True, (0, 0)),
        (4096, True, (4095, 0)),
        (4096, False, (4095, 4095)),
        (None, True, (None, None)),
        (None, False, (None, None)),
    ],
)
def test_a_window_of_w_keys_includes_the_querys_own(
    size: int | None, causal: bool, window: tuple[int | None, int | None]
) -> None:
    assert window_of(size, causal=causal) == window


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_a_window_of_no_keys_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"window={size!r} is not allowed; .* int >= 1"):
        window_of(size)


@pytest.mark.parametrize("window", [(None, None), (0, 0), (4095, 0), (None, 0), (3, None)])
def test_windows_of_counts_pass(window: tuple[int | None, int | None]) -> None:
    check_window(window)


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (1.0, 0), (True, 0), [3, 0], (3,), 3, None])
def test_windows_that_are_no_counts_are_refused(window: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"window=.*\(left, right\).*window_of\(W\)"):
        check_window(window)


@pytest.mark.parametrize("softcap", [None, 30.0, 50, 1e-3])
def test_softcaps_that_are_positive_pass(softcap: float | None) -> None:
    check_softcap(softcap)


@pytest.mark.parametrize(
    "softcap", [0, 0.0, -30.0, float("inf"), float("nan"), True, "30", 1e-46, 1e39, 10**400]
)
def test_other_softcaps_are_refused(softcap: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"softcap=.*None for off"):
        check_softcap(softcap)


@pytest.mark.parametrize("value", [0, -1, True, 64.0, "64", None])
@pytest.mark.parametrize(
    "field", ["num_heads", "num_kv_heads", "head_size", "dcp_size", "pcp_size"]
)
def test_counts_are_positive_ints(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}={value!r} is not allowed; .*>= 1"):
        request(**{field: value})


@pytest.mark.parametrize("value", [0, -16, True, 16.0])
@pytest.mark.parametrize("field", ["head_size_v", "block_size", "chunk_size"])
def test_optional_counts_are_positive_ints_or_none(field: str, value: object) -> None:
    assert getattr(request(**{field: None}), field) is None
    with pytest.raises(InvalidRequestError, match=f"^{field}={value!r} is not allowed"):
        request(**{field: value})


@pytest.mark.parametrize(
    "field",
    [
        "use_sparse",
        "has_sinks",
        "non_causal",
        "per_request_causal",
        "use_mm_prefix",
        "has_alibi",
        "batch_invariant",
        "use_kv_connector",
        "per_head_quant_scales",
        "needs_lse",
    ],
)
def test_flags_are_bools_and_off_by_default(field: str) -> None:
    assert getattr(request(), field) is False
    assert getattr(request(**{field: True}), field) is True
    for value in (1, "yes", torch.ones(1)):
        with pytest.raises(InvalidRequestError, match=f"^{field}=.* allowed: True or False"):
            request(**{field: value})


def test_query_heads_divide_among_kv_heads() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request(num_heads=10, num_kv_heads=4)
    assert str(caught.value).startswith(
        "num_kv_heads=4 is not allowed; allowed: a divisor of num_heads=10. Hint: each kv head"
    )


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 8, 20])
def test_any_whole_ratio_of_heads_passes(ratio: int) -> None:
    assert request(num_heads=2 * ratio, num_kv_heads=2).queries_per_kv == ratio


def test_names_become_dtypes_and_enum_members() -> None:
    asked = request(dtype="bf16", attn_type="encoder_only", phase="decode", kv_layout="HND")
    assert asked.dtype is torch.bfloat16
    assert asked.attn_type is AttentionType.ENCODER_ONLY
    assert asked.phase is Phase.DECODE
    assert asked.kv_layout is KVCacheLayout.HND
    assert asked == request(
        dtype=torch.bfloat16,
        attn_type=AttentionType.ENCODER_ONLY,
        phase=Phase.DECODE,
        kv_layout=KVCacheLayout.HND,
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "float8", "unknown dtype 'float8'; allowed: bfloat16, float16, float32"),
        ("kv_cache_dtype", "fp7", "unknown kv_cache_dtype 'fp7'; allowed: auto, bfloat16"),
        ("attn_type", "decode", "unknown attn_type 'decode'; .*did you mean 'decoder'"),
        ("phase", "Decode", "unknown phase 'Decode'; .*did you mean 'decode'"),
        ("kv_layout", "DHN", "unknown kv_layout 'DHN'; allowed: HND, NHD"),
        ("kv_layout", 3, "unknown kv_layout 3; allowed: HND, NHD"),
    ],
)
def test_unknown_names_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        request(**{field: value})


@pytest.mark.parametrize("version", [1, 5, "3", 3.0, True])
def test_a_flash_attention_that_does_not_exist_is_refused(version: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"flash_attn_version=.* allowed: 2, 3 or 4"):
        request(flash_attn_version=version)


def test_value_heads_are_as_wide_as_key_heads_unless_said() -> None:
    assert request().value_size == 64
    assert request(head_size_v=128).value_size == 128


def mla(**options: Any) -> AttentionRequest:
    return request(**{"mla": MLADims(), "num_kv_heads": 1, "head_size": 576, **options})


@pytest.mark.parametrize("dims", [True, 576, {"kv_lora_rank": 512}])
def test_mla_is_given_as_widths(dims: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"mla=.* allowed: MLADims, or None"):
        request(mla=dims)


def test_mla_widths_of_deepseek() -> None:
    dims = MLADims()
    assert (dims.kv_lora_rank, dims.qk_rope_head_dim, dims.latent_size) == (512, 64, 576)
    assert mla().use_mla
    assert not request().use_mla
    assert mla().value_size == mla(head_size_v=512).value_size == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_size": 192}, r"head_size=192 .* 576 with mla \(kv_lora_rank \+ qk_rope_head_dim\)"),
        ({"head_size_v": 128}, "head_size_v=128 .* 512 with mla"),
        ({"num_kv_heads": 8}, "num_kv_heads=8 .* 1 with mla .*one latent serves all heads"),
    ],
)
def test_mla_widths_follow_from_the_dims(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        mla(**options)


@pytest.mark.parametrize("field", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"])
def test_mla_widths_are_positive(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"mla.{field}=0 is not allowed"):
        MLADims(**{field: 0})


def test_a_selection_of_keys_belongs_to_sparse_attention() -> None:
    assert request(use_sparse=True, index_topk=2048).index_topk == 2048
    with pytest.raises(InvalidRequestError, match=r"index_topk=2048 .*None without use_sparse"):
        request(index_topk=2048)


@pytest.mark.parametrize(
    ("options", "is_causal"),
    [
        ({}, True),
        ({"use_mm_prefix": True}, True),
        ({"non_causal": True}, False),
        ({"per_request_causal": True}, False),
        ({"attn_type": "encoder"}, False),
        ({"attn_type": "encoder_only"}, False),
        ({"attn_type": "encoder_decoder"}, False),
    ],
)
def test_only_plain_decoders_are_causal_throughout(
    options: dict[str, Any], is_causal: bool
) -> None:
    assert request(**options).is_causal is is_causal


@pytest.mark.parametrize(
    ("window", "causal", "has_window", "has_right_window"),
    [
        ((None, None), True, False, False),
        ((None, None), False, False, False),
        ((3, 0), True, True, False),
        ((3, 3), True, True, False),  # the causal mask hides what the right side would
        ((None, 0), True, False, False),
        ((None, 0), False, True, True),  # without a causal mask, 0 to the right is a bound
        ((3, None), False, True, False),
        ((3, 3), False, True, True),
    ],
)
def test_a_window_counts_where_it_hides_keys(
    window: tuple[int | None, int | None],
    causal: bool,
    has_window: bool,
    has_right_window: bool,
) -> None:
    asked = request(window=window, non_causal=not causal)
    assert asked.has_window is has_window
    assert asked.has_right_window is has_right_window


@pytest.mark.parametrize(
    ("attn_type", "is_cache_free"),
    [("decoder", False), ("encoder", True), ("encoder_only", True), ("encoder_decoder", False)],
)
def test_encoders_have_no_cache(attn_type: str, is_cache_free: bool) -> None:
    assert request(attn_type=attn_type).is_cache_free is is_cache_free


@pytest.mark.parametrize(
    ("tp_size", "heads", "kv_heads"),
    [(1, 32, 8), (4, 8, 2), (8, 4, 1), (16, 2, 1), (32, 1, 1)],
)
def test_a_rank_has_its_share_and_at_least_one_kv_head(
    tp_size: int, heads: int, kv_heads: int
) -> None:
    rank = AttentionRequest.for_rank(
        total_num_heads=32, total_num_kv_heads=8, tp_size=tp_size, head_size=64, has_sinks=True
    )
    assert (rank.num_heads, rank.num_kv_heads, rank.has_sinks) == (heads, kv_heads, True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size", "message"),
    [
        (32, 8, 3, "tp_size=3 .* a divisor of total_num_heads=32"),
        (12, 3, 2, "tp_size=2 .* a divisor or a multiple of total_num_kv_heads=3"),
        (32, 8, 0, "tp_size=0 .* int >= 1"),
        (32, 0, 4, "total_num_kv_heads=0 .* int >= 1"),
        (0, 1, 1, "num_heads=0 .* int >= 1"),
    ],
)
def test_heads_that_do_not_divide_among_ranks_are_refused(
    heads: int, kv_heads: int, tp_size: int, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        AttentionRequest.for_rank(
            total_num_heads=heads, total_num_kv_heads=kv_heads, tp_size=tp_size, head_size=64
        )


def test_a_copy_with_other_options_is_validated_anew() -> None:
    assert request().with_options(block_size=32) == request(block_size=32)
    with pytest.raises(InvalidRequestError, match="block_size=0"):
        request().with_options(block_size=0)


def test_equal_requests_are_one_key() -> None:
    assert {request(): 1}[request()] == 1
    assert request() != request(has_sinks=True)


def test_a_request_is_json_safe_with_every_field() -> None:
    asked = mla(window=(3, 0), kv_layout="HND")
    record = json.loads(json.dumps(asked.to_dict()))
    assert record["dtype"] == "bfloat16"
    assert record["window"] == [3, 0]
    assert record["attn_type"] == "decoder"
    assert record["phase"] == "mixed"
    assert record["kv_layout"] == "HND"
    assert record["mla"]["kv_lora_rank"] == 512
    assert request().to_dict()["kv_layout"] is None
    assert set(record) == set(AttentionRequest.__dataclass_fields__)
    assert all(type(value) is not AttentionType for value in asked.to_dict().values())


def test_a_request_keeps_its_meaning_when_pickled() -> None:
    asked = mla(window=(3, 0), dtype=torch.float16)
    hash(asked)
    assert pickle.loads(pickle.dumps(asked)) == asked
