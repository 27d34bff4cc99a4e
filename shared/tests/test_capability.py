from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
import torch
from attn_shared_fakes import CPU, GPU, capability, request
from hypothesis import given
from hypothesis import strategies as st

from attn_shared.capability import Capability, Reason, Rule, Support
from attn_shared.device import DeviceFacts, Vendor, preset
from attn_shared.dtypes import KVCacheLayout
from attn_shared.limits import BlockSize, DeviceLimit, Exactly, MultipleOf, SizeSet
from attn_shared.request import AttentionRequest, AttentionType, MLADims, Phase

FEATURES: dict[str, dict[str, Any]] = {
    "sinks": {"has_sinks": True},
    "window": {"window": (127, 0)},
    "two_sided_window": {"window": (127, 127), "non_causal": True},
    "chunked_local": {"chunk_size": 8192},
    "softcap": {"softcap": 30.0},
    "alibi": {"has_alibi": True},
    "non_causal": {"non_causal": True},
    "per_request_causal": {"per_request_causal": True},
    "mm_prefix": {"use_mm_prefix": True},
    "batch_invariant": {"batch_invariant": True},
    "kv_connector": {"use_kv_connector": True},
    "per_head_quant_scales": {"per_head_quant_scales": True},
    "lse": {"needs_lse": True},
    "flash_attn_version": {"flash_attn_version": 3},
    "dcp": {"dcp_size": 2},
    "pcp": {"pcp_size": 4},
}
"""Field of a capability -> what asks for it."""


def reasons(served: Capability, asked: AttentionRequest, device: DeviceFacts = GPU) -> list[str]:
    return [str(reason) for reason in served.check(asked, device)]


def test_a_request_within_all_limits_has_no_reason() -> None:
    assert reasons(capability(), request()) == []


@pytest.mark.parametrize(
    ("served", "asked", "reason"),
    [
        ({}, {"head_size": 512}, "head_size=512 (allowed: 8 to 256, a multiple of 8)"),
        ({"head_sizes": SizeSet.of(64, 128)}, {"head_size": 80}, "head_size=80 (allowed: 64, 128)"),
        ({}, {"head_size_v": 128}, "head_size_v=128 (allowed: 64, as head_size)"),
        (
            {"head_sizes_v": SizeSet.of(512)},
            {"head_size_v": 128},
            "head_size_v=128 (allowed: 64, as head_size, or 512)",
        ),
        ({}, {"dtype": "float32"}, "dtype=float32 (allowed: bfloat16, float16)"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 (allowed: auto)"),
        ({}, {"kv_cache_dtype": "float32"}, "kv_cache_dtype=float32 (allowed: auto)"),
        (
            {},
            {"block_size": 15},
            "block_size=15 (allowed: a multiple of 16); leave it open to get 16",
        ),
        (
            {"block_sizes": (16, MultipleOf(24)), "max_block_size": 64},
            {"block_size": 128},
            "block_size=128 (allowed: a multiple of 16 or 24, at most 64); leave it open to get 16",
        ),
        (
            {"block_sizes": ()},
            {},
            "block_size=None (allowed: none: this backend reads no paged cache)",
        ),
        ({}, {"kv_layout": "HND"}, "kv_layout=HND (allowed: NHD)"),
        ({}, {"use_sparse": True}, "sparse=True (allowed: False)"),
        ({"is_sparse": True}, {}, "sparse=False (allowed: True)"),
        ({"is_mla": True}, {}, "mla=False (allowed: True)"),
        ({}, {"attn_type": "encoder"}, "attn_type=encoder (allowed: decoder)"),
        ({"phases": frozenset({Phase.DECODE})}, {}, "phase=mixed (allowed: decode)"),
        ({}, {"has_sinks": True}, "sink=True (allowed: False)"),
        ({}, {"window": (127, 0)}, "window=(127, 0) (allowed: no window)"),
        ({}, {"chunk_size": 8192}, "chunked_local=8192 (allowed: None)"),
        ({}, {"softcap": 30.0}, "softcap=30.0 (allowed: None)"),
        ({}, {"has_alibi": True}, "alibi=True (allowed: False)"),
        ({}, {"batch_invariant": True}, "batch_invariance=True (allowed: False)"),
        ({}, {"dcp_size": 2}, "dcp=2 (allowed: 1)"),
        ({}, {"pcp_size": 4}, "pcp=4 (allowed: 1)"),
        (
            {"dcp": Support.YES},
            {"dcp_size": 2},
            "dcp_lse=False (allowed: a backend that returns its LSE, with dcp_size=2)",
        ),
    ],
)
def test_each_limit_says_value_and_what_is_allowed(
    served: dict[str, Any], asked: dict[str, Any], reason: str
) -> None:
    assert reasons(capability(**served), request(**asked)) == [reason]


@pytest.mark.parametrize(
    ("limits", "device", "reason"),
    [
        (
            (DeviceLimit(vendor=Vendor.NVIDIA, families=(10,)),),
            GPU,
            "device=nvidia sm_90 (9.0) (allowed: nvidia family 10.x)",
        ),
        (
            (
                DeviceLimit(vendor=Vendor.AMD, archs=("gfx942",)),
                DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0)),
            ),
            CPU,
            "device=cpu x86_64 (allowed: amd gfx942; nvidia >= 8.0)",
        ),
        ((), GPU, "device=nvidia sm_90 (9.0) (allowed: none)"),
    ],
)
def test_a_device_outside_all_limits_is_named_with_them(
    limits: tuple[DeviceLimit, ...], device: DeviceFacts, reason: str
) -> None:
    assert reasons(capability(devices=limits), request(), device) == [reason]


def test_one_admitting_limit_is_enough() -> None:
    limits = (DeviceLimit(vendor=Vendor.AMD), DeviceLimit(vendor=Vendor.NVIDIA))
    assert reasons(capability(devices=limits), request(), GPU) == []
    assert reasons(capability(devices=limits), request(), preset("mi300x")) == []


def test_all_reasons_are_given_in_a_fixed_order() -> None:
    asked = request(head_size=20, dtype="float32", block_size=15, has_sinks=True, dcp_size=2)
    codes = [reason.code for reason in capability().check(asked, CPU)]
    assert codes == ["device", "head_size", "dtype", "block_size", "sink", "dcp"]


def test_a_new_feature_is_unsupported_until_it_is_declared() -> None:
    defaults = {field.name: field.default for field in fields(Capability)}
    supports = {name for name, value in defaults.items() if isinstance(value, Support)}
    assert supports == set(FEATURES)
    assert all(defaults[name] is Support.NO for name in supports)


@pytest.mark.parametrize("field", FEATURES)
def test_a_declared_feature_is_served(field: str) -> None:
    asked = request(**FEATURES[field])
    also = {"two_sided_window": {"window", "non_causal"}, "dcp": {"lse"}}
    needed = {field} | also.get(field, set())
    assert reasons(capability(), asked) != []
    for support in (Support.YES, Support.SLOW):
        assert reasons(capability(**dict.fromkeys(needed, support)), asked) == []


@pytest.mark.parametrize(
    ("window", "non_causal", "codes"),
    [
        ((127, 0), False, ["window"]),
        ((127, 127), False, ["window"]),
        ((None, 0), False, []),
        ((127, None), True, ["window", "non_causal"]),
        ((None, 0), True, ["window", "two_sided_window", "non_causal"]),
        ((127, 127), True, ["window", "two_sided_window", "non_causal"]),
    ],
)
def test_the_right_side_of_a_window_counts_without_a_causal_mask(
    window: tuple[int | None, int | None], non_causal: bool, codes: list[str]
) -> None:
    asked = request(window=window, non_causal=non_causal)
    assert [reason.code for reason in capability().check(asked, GPU)] == codes


def test_slow_features_are_those_asked_for_and_served_slowly() -> None:
    served = capability(sinks=Support.SLOW, softcap=Support.SLOW, alibi=Support.YES)
    assert served.slow_features(request(has_sinks=True, has_alibi=True)) == ("sink",)
    assert served.slow_features(request(softcap=30.0, has_sinks=True)) == ("sink", "softcap")
    assert served.slow_features(request()) == ()


@pytest.mark.parametrize(
    ("block_sizes", "most", "accepted", "refused"),
    [
        ((16,), None, [16, 32, 672], [1, 8, 15, 24]),  # a listed size is a divisor
        ((MultipleOf(16),), None, [16, 32, 672], [1, 8, 15, 24]),
        ((64, 128), 128, [64, 128], [16, 192, 256]),
        ((1,), None, [1, 15, 16], []),
        ((Exactly(16), Exactly(32)), None, [16, 32], [8, 48, 64]),
        ((Exactly(16), MultipleOf(64)), None, [16, 64, 128], [32, 48]),
        ((), None, [], [1, 16]),
    ],
)
def test_a_block_is_of_a_listed_size(
    block_sizes: tuple[BlockSize, ...],
    most: int | None,
    accepted: list[int],
    refused: list[int],
) -> None:
    served = capability(block_sizes=block_sizes, max_block_size=most)
    assert [served.accepts_block_size(size) for size in accepted] == [True] * len(accepted)
    assert [served.accepts_block_size(size) for size in refused] == [False] * len(refused)


def test_the_preferred_block_is_taken_where_the_wish_is_none_or_refused() -> None:
    served = capability(block_sizes=(MultipleOf(64),), preferred_block_size=64)
    assert served.block_size_for() == 64
    assert served.block_size_for(128) == 128
    assert served.block_size_for(16) == 64


def test_the_layout_is_the_one_fixed_or_the_preferred() -> None:
    served = capability(kv_layouts=(KVCacheLayout.HND, KVCacheLayout.NHD))
    assert served.layout_for(request()) is KVCacheLayout.HND
    assert served.layout_for(request(kv_layout="NHD")) is KVCacheLayout.NHD
    assert served.layout_for(request(attn_type="encoder_only")) is None


def test_auto_admits_the_compute_dtype_by_name() -> None:
    assert reasons(capability(), request(kv_cache_dtype="bfloat16")) == []
    asked = request(kv_cache_dtype="bfloat16", dtype="float16")
    assert reasons(capability(), asked) == ["kv_cache_dtype=bfloat16 (allowed: auto)"]
    only = capability(kv_cache_dtypes=frozenset({"bfloat16"}))
    assert reasons(only, request()) == ["kv_cache_dtype=auto (allowed: bfloat16)"]


def test_a_cache_free_request_has_no_cache_to_object_to() -> None:
    served = capability(
        attn_types=frozenset({AttentionType.ENCODER_ONLY}),
        block_sizes=(),
        kv_cache_dtypes=frozenset(),
    )
    asked = request(attn_type="encoder_only", block_size=15, kv_layout="HND")
    assert reasons(served, asked) == []
    asked = request(attn_type="encoder_only", kv_cache_dtype="fp8")
    assert reasons(served, asked) == ["kv_cache_dtype=fp8 (allowed: )"]


def test_mla_is_its_own_kind() -> None:
    asked = request(mla=MLADims(), num_kv_heads=1, head_size=576)
    plain = capability(head_sizes=SizeSet.of(576))
    latent = capability(head_sizes=SizeSet.of(576), is_mla=True)
    assert reasons(plain, asked) == ["mla=True (allowed: False)"]
    assert reasons(latent, asked) == []


@pytest.mark.parametrize(
    ("phases", "served"),
    [
        ({Phase.MIXED}, ["mixed", "prefill", "decode"]),
        ({Phase.DECODE}, ["decode"]),
        ({Phase.DECODE, Phase.PREFILL}, ["prefill", "decode"]),
        (set(Phase), ["mixed", "prefill", "decode"]),
    ],
)
def test_mixed_implies_the_other_phases_and_not_the_reverse(
    phases: set[Phase], served: list[str]
) -> None:
    able = capability(phases=frozenset(phases))
    assert [str(phase) for phase in Phase if not reasons(able, request(phase=phase))] == served


def test_rules_see_request_and_device_and_come_last() -> None:
    def no_fp8_heads_of_80(asked: AttentionRequest, device: DeviceFacts) -> Reason | None:
        if asked.head_size != 80 or device.arch != "sm_90":
            return None
        return Reason(code="fp8_head_size", value="80", allowed="64, 128", hint="use bfloat16")

    served = capability(rules=(Rule(name="fp8_head_size", check=no_fp8_heads_of_80),))
    assert reasons(served, request()) == []
    assert reasons(served, request(head_size=80, has_sinks=True)) == [
        "sink=True (allowed: False)",
        "fp8_head_size=80 (allowed: 64, 128); use bfloat16",
    ]


def test_reasons_and_capabilities_are_json_safe() -> None:
    reason = Reason(code="head_size", value="512", allowed="64", hint="take another")
    assert json.loads(json.dumps(reason.to_dict())) == {
        "code": "head_size",
        "value": "512",
        "allowed": "64",
        "hint": "take another",
    }
    record = json.loads(json.dumps(capability(sinks=Support.SLOW).to_dict()))
    assert record["dtypes"] == ["bfloat16", "float16"]
    assert record["block_sizes"] == ["multiple of 16"]
    listed = capability(block_sizes=(64, Exactly(16))).to_dict()["block_sizes"]
    assert listed == ["multiple of 64", "16"]  # a plain number admits its multiples
    assert record["features"]["sink"] == "slow"
    assert record["features"]["lse"] == "no"
    assert len(record["features"]) == len(FEATURES)


supports = st.sampled_from(Support)
capabilities = st.builds(
    capability,
    phases=st.frozensets(st.sampled_from(Phase)),
    block_sizes=st.sampled_from([(), (16,), (MultipleOf(32), 24)]),
    max_block_size=st.sampled_from([None, 48]),
    kv_layouts=st.permutations(list(KVCacheLayout)).map(tuple),
    **dict.fromkeys(FEATURES, supports),
)
STRICTER = [
    *FEATURES.values(),
    {"block_size": 16},
    {"block_size": 96},
    {"kv_layout": "HND"},
    {"phase": "mixed"},
]
options = st.lists(st.sampled_from(STRICTER), max_size=5)


def asking(chosen: list[dict[str, Any]], phase: Phase) -> AttentionRequest:
    asked: dict[str, Any] = {"phase": phase}
    for option in chosen:
        asked.update(option)
    return request(**asked)


@given(capabilities, options, st.sampled_from(STRICTER), st.sampled_from(Phase))
def test_asking_for_more_never_gains_a_backend(
    served: Capability, chosen: list[dict[str, Any]], more: dict[str, Any], phase: Phase
) -> None:
    fewer = [option for option in chosen if not option.keys() & more.keys() - {"non_causal"}]
    if served.check(asking(fewer, phase), GPU):
        assert served.check(asking([*fewer, more], phase), GPU)


@given(capabilities, options, supports, st.sampled_from(sorted(FEATURES)))
def test_serving_more_never_loses_a_request(
    served: Capability, chosen: list[dict[str, Any]], support: Support, field: str
) -> None:
    asked = asking(chosen, Phase.MIXED)
    features = {name: getattr(served, name) for name in FEATURES}
    able = capability(block_sizes=(16,), **features)
    abler = capability(block_sizes=(16,), **{**features, field: max(support, features[field])})
    if not able.check(asked, GPU):
        assert not abler.check(asked, GPU)


@given(st.integers(1, 600), st.sampled_from([torch.float16, torch.float32]))
def test_a_check_has_one_answer(head_size: int, dtype: torch.dtype) -> None:
    asked = request(head_size=head_size, dtype=dtype)
    assert capability().check(asked, GPU) == capability().check(asked, GPU)
    is_refused = head_size % 8 != 0 or head_size > 256 or dtype is torch.float32
    assert bool(capability().check(asked, GPU)) is is_refused
