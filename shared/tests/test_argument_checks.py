"""What a caller hands over by mistake is refused by name, not by an error of torch or Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_shared_fakes import GPU, request

from attn_shared import batching, cascade, kv_write, local_attention, merge, quantization
from attn_shared import context_parallel as ranks
from attn_shared.argument_checks import require_count, require_kind
from attn_shared.choice import select
from attn_shared.device import resolve_device
from attn_shared.errors import AttnError, InvalidInputError, InvalidRequestError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.selection import Policy

TABLE = torch.tensor([[0, 1], [0, 2]])
COMMON = CommonAttentionMetadata.from_lengths(
    query_lens=[1, 1], seq_lens=[20, 20], block_table=TABLE, block_size=16
)
SPEC = FullAttentionSpec(
    block_size=16, dtype=torch.float32, num_kv_heads=4, head_size=8, head_size_v=8
)
ROWS, LSE = torch.zeros(3, 4, 8), torch.zeros(4, 3)
STARTS, LENS = torch.tensor([0, 1, 2]), torch.tensor([20, 20])
PLACE = {"world_size": 2, "interleave": 1}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "select": (
        select,
        {"request": request(), "device": GPU, "inventory": Inventory(), "policy": Policy()},
    ),
    "Policy": (
        Policy,
        {
            "required": "A",
            "backend": "B",
            "source": "a test",
            "prefer": ("x",),
            "avoid": ("y",),
            "measured": ("A",),
            "remarks": ("r",),
        },
    ),
    "resolve_device": (resolve_device, {"text": "h200"}),
    "merge_attn_states": (
        merge.merge_attn_states,
        {"output_a": ROWS, "lse_a": LSE, "output_b": ROWS, "lse_b": LSE},
    ),
    "merge_many": (merge.merge_many, {"outputs": [ROWS, ROWS], "lses": [LSE, LSE]}),
    "to_natural": (lambda lse: merge.to_natural(lse, lse_base_on_e=False), {"lse": LSE}),
    "common_prefix_len": (
        cascade.common_prefix_len,
        {"block_table": TABLE, "num_computed": [20, 20], "block_size": 16},
    ),
    "check_cascade": (
        cascade.check_cascade,
        {"common": COMMON, "common_prefix_len": 16, "block_size": 16},
    ),
    "use_cascade": (
        cascade.use_cascade,
        {
            "common_prefix_len": 512,
            "query_lens": [1] * 8,
            "num_heads": 8,
            "num_kv_heads": 2,
            "num_compute_units": 4,
            "dcp_size": 1,
        },
    ),
    "combine_shards": (ranks.combine_shards, {"outputs": [ROWS, ROWS], "lses": [LSE, LSE]}),
    "owner_of": (ranks.owner_of, {"positions": LENS, **PLACE}),
    "local_index": (ranks.local_index, {"positions": LENS, **PLACE}),
    "local_seq_lens": (ranks.local_seq_lens, {"seq_lens": LENS, **PLACE}),
    "check_dcp": (ranks.check_dcp, {"dcp_size": 2, "tp_size": 4, "interleave": 1}),
    "virtual batches": (
        local_attention.make_local_attention_virtual_batches,
        {"common": COMMON, "chunk_size": 16, "block_size": 16},
    ),
    "split_decodes_and_prefills": (
        batching.split_decodes_and_prefills,
        {"common": COMMON, "decode_threshold": 1},
    ),
    "split_decodes_extends_and_prefills": (
        batching.split_decodes_extends_and_prefills,
        {"common": COMMON, "decode_threshold": 1},
    ),
    "reorder": (
        batching.reorder,
        {
            "num_scheduled": [1, 2],
            "num_computed": [3, 0],
            "num_prompt": [3, 2],
            "decode_threshold": 1,
        },
    ),
    "write_kv": (
        kv_write.write_kv,
        {
            "kv_cache": SPEC.allocate(3, "cpu"),
            "spec": SPEC,
            "key": ROWS,
            "value": ROWS,
            "slot_mapping": torch.tensor([0, 1, 2]),
        },
    ),
    "slot_mapping_for": (
        kv_write.slot_mapping_for,
        {"block_table": TABLE, "query_start_loc": STARTS, "seq_lens": LENS, "block_size": 16},
    ),
    "quantize_fp8": (
        lambda x, scale: quantization.quantize_fp8(x, scale, torch.float8_e4m3fn),
        {"x": ROWS, "scale": 1.0},
    ),
    "quantize_int8_per_token_head": (quantization.quantize_int8_per_token_head, {"x": ROWS}),
}

MAY_BE_NONE = {("select", "policy"), ("Policy", "required"), ("Policy", "backend")}


def bad_values(name: str, argument: str) -> list[Any]:
    words = [] if name == "Policy" and argument in ("required", "backend", "source") else ["x"]
    nothing = [] if (name, argument) in MAY_BE_NONE else [None]
    is_number = (name, argument) == ("quantize_fp8", "scale")
    numbers = [] if is_number else [1.5]
    return [object(), {}, *words, *nothing, *numbers, float("nan"), torch.zeros(2, 2, 2).bool()]


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_another_kind_are_refused_by_name(name: str) -> None:
    call, good = CALLS[name]
    for argument in good:
        for bad in bad_values(name, argument):
            with pytest.raises(AttnError) as caught:
                call(**{**good, argument: bad})
            assert not isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("use_cascade", "num_compute_units", 0),
        ("use_cascade", "num_kv_heads", 2**70),
        ("check_dcp", "interleave", 2**70),
        ("check_dcp", "dcp_size", -1),
        ("owner_of", "world_size", 2**70),
        ("virtual batches", "chunk_size", 2**70),
        ("slot_mapping_for", "block_size", 0),
        ("slot_mapping_for", "block_size", 2**70),
        ("reorder", "num_computed", [3, None]),
        ("write_kv", "key", ROWS.to(torch.complex64)),
        ("write_kv", "key", ROWS.long()),
        ("quantize_fp8", "scale", 2**200),
        ("quantize_int8_per_token_head", "x", torch.zeros(3, 0)),
    ],
)
def test_values_that_no_kernel_may_meet(name: str, argument: str, value: Any) -> None:
    call, good = CALLS[name]
    with pytest.raises((InvalidInputError, InvalidRequestError)):
        call(**{**good, argument: value})


def test_a_cache_of_more_bytes_than_are_counted() -> None:
    with pytest.raises(InvalidRequestError, match=r"num_blocks=.* at most .* bytes each"):
        SPEC.allocate(2**60, "cpu")
    with pytest.raises(InvalidRequestError, match="an int of 64 bits"):
        SPEC.allocate(2**70, "cpu")


def test_a_refusal_says_what_was_given_and_what_is_allowed() -> None:
    with pytest.raises(
        InvalidInputError, match="spec is an int; allowed: an Inventory or a Policy"
    ):
        require_kind("spec", 3, Inventory, Policy)
    with pytest.raises(InvalidInputError, match="size is True; allowed: an integer >= 0"):
        require_count("size", True, least=0)
    with pytest.raises(InvalidInputError, match=r"allowed: a DeviceFacts\. Hint: resolve"):
        select(request(), "h200", Inventory())  # type: ignore[arg-type]
