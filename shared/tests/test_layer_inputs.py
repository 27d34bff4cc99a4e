from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_shared_fakes import request

from attn_shared._layer_inputs import (
    blocks_bound,
    check_batch_kind,
    check_cache_size,
    check_config,
    check_lengths,
    check_options,
    check_places,
    device_of,
    group_sizes,
    per_head,
    policy_of,
)
from attn_shared.errors import (
    InvalidInputError,
    InvalidRequestError,
    MetadataError,
    UnknownNameError,
)
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ranks import ContextParallel
from attn_shared.request import AttentionType
from attn_shared.selection import Policy
from attn_shared.spec import BuildConfig

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
ONE = torch.tensor([1], dtype=torch.int32)
STARTS = torch.tensor([0, 1], dtype=torch.int32)


def batch(**options: Any) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(query_lens=[1], seq_lens=[1], **options)


class TestArguments:
    def test_options_are_fields_of_a_request(self) -> None:
        check_options(["window", "softcap", "mla"], ["sinks"])
        with pytest.raises(UnknownNameError, match=r"'windw'; .* did you mean 'window'"):
            check_options(["windw"], ["sinks"])
        with pytest.raises(UnknownNameError, match="did you mean 'sinks'"):
            check_options(["sink"], ["sinks"])

    @pytest.mark.parametrize(
        ("field", "argument"), [("has_sinks", "sinks"), ("has_alibi", "alibi_slopes")]
    )
    def test_what_follows_from_a_tensor_is_not_set(self, field: str, argument: str) -> None:
        with pytest.raises(InvalidRequestError, match=f"{field} .* pass {argument}="):
            check_options([field], [argument])

    def test_a_tensor_that_a_layer_does_not_take_is_not_asked_for(self) -> None:
        with pytest.raises(InvalidRequestError, match="this layer takes no sinks"):
            check_options(["has_sinks"], ["scale"])

    def test_a_device_is_one_of_torch(self) -> None:
        assert device_of("cpu") == device_of(CPU) == CPU
        assert device_of("cuda:1") == torch.device("cuda", 1)

    @pytest.mark.parametrize("device", ["bogus", "h200", 0, None, ["cpu"]])
    def test_another_is_refused(self, device: object) -> None:
        with pytest.raises(InvalidRequestError, match=r"device=.* allowed: a torch device"):
            device_of(device)

    def test_a_preset_is_for_selection_alone(self) -> None:
        with pytest.raises(InvalidRequestError, match="attn select"):
            device_of("h200")

    def test_a_backend_is_a_name_or_a_policy(self) -> None:
        named = Policy(backend="X", source="somewhere")
        assert policy_of(named) is named
        assert policy_of("X") == Policy(backend="X")
        assert policy_of("auto") == policy_of(None) == Policy()
        with pytest.raises(InvalidRequestError, match=r"backend=3 .* a backend's name, a Policy"):
            policy_of(3)

    @pytest.mark.parametrize("config", [{}, False, {"checked": True}])
    def test_a_config_is_not_taken_for_none(self, config: object) -> None:
        with pytest.raises(InvalidRequestError, match=r"config=.* allowed: a BuildConfig"):
            check_config(config)

    def test_no_config_is_the_default(self) -> None:
        own = BuildConfig(max_num_seqs=3)
        assert check_config(own) is own
        assert check_config(None) == BuildConfig()


class TestPerHead:
    def test_it_becomes_float32(self) -> None:
        values = per_head("sinks", torch.tensor([0.5, -INF], dtype=torch.float64), 2, CPU)
        assert values is not None
        assert values.dtype is torch.float32
        assert values.tolist() == [0.5, -INF]
        assert per_head("sinks", None, 2, CPU) is None

    @pytest.mark.parametrize(
        ("name", "values", "words"),
        [
            ("sinks", torch.tensor([0.0, NAN]), r"sinks\[1\] is nan; allowed: a finite number or"),
            ("sinks", torch.tensor([INF, 0.0]), r"sinks\[0\] is inf"),
            ("alibi_slopes", torch.tensor([NAN, 0.0]), r"alibi_slopes\[0\] is nan"),
            ("alibi_slopes", torch.tensor([0.0, -INF]), r"alibi_slopes\[1\] is -inf"),
            ("sinks", torch.zeros(2, dtype=torch.int32), "sinks dtype is torch.int32"),
            ("sinks", torch.zeros(2, dtype=torch.bool), "sinks dtype is torch.bool"),
            ("sinks", torch.zeros(3), r"sinks shape is \(3,\); allowed: \(2,\)"),
            ("sinks", [0.0, 0.0], r"sinks is \[0.0, 0.0\]; allowed: a tensor \(2,\)"),
            ("sinks", torch.zeros(2, device="meta"), "sinks device is meta"),
        ],
    )
    def test_what_no_kernel_may_get(self, name: str, values: object, words: str) -> None:
        with pytest.raises(InvalidInputError, match=words):
            per_head(name, values, 2, CPU)


PAGED = {"block_table": torch.tensor([[3]]), "block_size": 4}
CROSS = {"block_table": torch.tensor([[3]]), "encoder_seq_lens": ONE}


class TestBatchKind:
    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("decoder", PAGED),
            ("encoder_only", {"key_start_loc": STARTS, "key_start_loc_cpu": STARTS}),
            ("encoder", {}),
            ("encoder_decoder", CROSS),
        ],
    )
    def test_its_own_fields_are_taken(self, kind: str, options: dict[str, Any]) -> None:
        check_batch_kind(batch(**options), request(attn_type=kind))

    @pytest.mark.parametrize(
        ("kind", "options", "words"),
        [
            ("decoder", CROSS, "encoder_seq_lens is given; allowed: None with attn_type=decoder"),
            ("decoder", PAGED | {"encoder_seq_lens_cpu": ONE}, "encoder_seq_lens_cpu is given"),
            (
                "decoder",
                PAGED | {"key_start_loc": STARTS, "key_start_loc_cpu": STARTS},
                "key_start_loc is given; allowed: None with attn_type=decoder",
            ),
            ("decoder", PAGED | {"dcp_local_seq_lens": ONE}, "dcp_local_seq_lens .* dcp_size=1"),
            ("encoder_only", PAGED, "block_table is given; .* attn_type=encoder_only"),
            ("encoder", {"slot_mapping": torch.tensor([3])}, "slot_mapping is given"),
            ("encoder", {"encoder_seq_lens": ONE}, "encoder_seq_lens is given"),
            ("encoder_decoder", PAGED, r"encoder_seq_lens is None; allowed: \(B,\) int32"),
            (
                "encoder_decoder",
                CROSS | {"key_start_loc": STARTS, "key_start_loc_cpu": STARTS},
                "key_start_loc is given",
            ),
        ],
    )
    def test_those_of_another_are_refused(
        self, kind: str, options: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(MetadataError, match=words):
            check_batch_kind(batch(**options), request(attn_type=kind))

    def test_a_shard_of_the_lengths_needs_a_group(self) -> None:
        check_batch_kind(batch(**PAGED, dcp_local_seq_lens=ONE), request(dcp_size=2))

    def test_a_batch_is_a_description(self) -> None:
        with pytest.raises(MetadataError, match="common is a dict"):
            check_batch_kind({}, request(attn_type=AttentionType.DECODER))


class TestCalls:
    def test_tensors_and_none_are_taken(self) -> None:
        one = torch.zeros(2, 3, 4)
        check_places(one, None, one, one.transpose(0, 1), one[:, ::2])

    @pytest.mark.parametrize("name", ["key", "value", "kv_cache"])
    def test_what_is_no_tensor(self, name: str) -> None:
        plain = dict.fromkeys(("key", "value", "kv_cache", "output", "lse"))
        with pytest.raises(InvalidInputError, match=f"{name} is a list; allowed: a tensor"):
            check_places(**{**plain, name: [torch.zeros(2)]})

    @pytest.mark.parametrize("name", ["output", "lse"])
    def test_results_that_share_memory(self, name: str) -> None:
        plain = dict.fromkeys(("key", "value", "kv_cache", "output", "lse"))
        shared = torch.zeros(1, 3).expand(2, 3)
        with pytest.raises(InvalidInputError, match=rf"{name} is of strides \(0, 1\) over"):
            check_places(**{**plain, name: shared})

    def test_a_cache_has_every_block_that_is_named(self) -> None:
        spec = FullAttentionSpec(
            block_size=4, dtype=torch.float32, num_kv_heads=1, head_size=2, head_size_v=2
        )
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[1, 1],
            seq_lens=[5, 3],
            block_table=torch.tensor([[3, 4], [0, 99]]),
            block_size=4,
        )
        bound = blocks_bound(common, spec, is_checked=False)
        assert bound == 100
        check_cache_size(torch.zeros(5, 2), bound, common, spec)  # nobody reads block 99
        check_cache_size(torch.zeros(4, 2), None, common, spec)
        check_cache_size(None, bound, common, spec)
        with pytest.raises(
            InvalidInputError, match=r"blocks is 4; allowed: at least 5: .* block 4"
        ):
            check_cache_size(torch.zeros(4, 2), bound, common, spec)

    @pytest.mark.parametrize(
        ("lengths", "words"),
        [
            ([7, -1], r"lengths\[1\] is -1; allowed: an integer >= 0"),
            ([6.0], r"lengths\[0\] is 6.0"),
            (6, "lengths is 6; allowed: a sequence of integers"),
            ([3, 4], "sum of lengths is 7; allowed: 6, the rows of query"),
        ],
    )
    def test_lengths_are_those_of_the_query(self, lengths: Any, words: str) -> None:
        check_lengths([6, 0], torch.zeros(6, 1))
        with pytest.raises(InvalidInputError, match=words):
            check_lengths(lengths, torch.zeros(6, 1))

    def test_a_query_is_a_tensor(self) -> None:
        with pytest.raises(InvalidInputError, match="query is a list"):
            check_lengths([1], [[0.0]])


def test_sizes_of_groups_are_those_of_the_groups() -> None:
    place, sizes = group_sizes(None, {"window": (3, 0)})
    assert place == ContextParallel()
    assert sizes == {"dcp_size": 1, "pcp_size": 1}
    assert group_sizes(place, {"dcp_size": 1})[0] is place
    with pytest.raises(
        InvalidRequestError, match="dcp_size=2 is not allowed; allowed: 1, the size"
    ):
        group_sizes(None, {"dcp_size": 2})
    with pytest.raises(InvalidRequestError, match=r"context_parallel='x' .* a ContextParallel"):
        group_sizes("x", {})
