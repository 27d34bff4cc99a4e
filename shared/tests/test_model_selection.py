from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from attn_shared_fakes import GPU, backend, capability, registry_of

from attn_shared.capability import Capability, Support
from attn_shared.choice import select
from attn_shared.errors import BackendRejectedError, NoBackendError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from attn_shared.limits import SizeSet
from attn_shared.model_config import ModelLayers, model_layers
from attn_shared.model_selection import ModelSelection, Resolve, select_model
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.selection import Policy, Selection

GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 100,
    "max_position_embeddings": 1000,
    "torch_dtype": "bfloat16",
}
HYBRID = {
    "model_type": "jamba",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def resolve_with(*served: tuple[str, Capability], policy: Policy | None = None) -> Resolve:
    """Answer with backends in this order."""

    def of(found: Capability) -> Any:
        return lambda device, inventory: found

    registry = registry_of(*(backend(name, of(found)) for name, found in served))

    def resolve(request: AttentionRequest) -> Selection:
        return select(request, GPU, Inventory(), policy, registry=registry)

    return resolve


def full_only(block_size: int) -> Capability:
    return capability(block_sizes=(block_size,), preferred_block_size=block_size)


def windowed(block_size: int, *more: int) -> Capability:
    sizes = (block_size, *more)
    return capability(window=Support.YES, block_sizes=sizes, preferred_block_size=block_size)


def gemma(**options: Any) -> ModelLayers:
    return model_layers(GEMMA, **options)


def test_each_group_gets_a_backend_and_all_one_block_size() -> None:
    found = select_model(gemma(), resolve_with(("ONE", windowed(16))))
    window, full = found.groups
    assert found.backends == ("ONE",)
    assert found.block_size == 16
    assert window.spec == SlidingWindowSpec(
        block_size=16,
        dtype=torch.bfloat16,
        num_kv_heads=2,
        head_size=64,
        head_size_v=64,
        window_left=99,
    )
    assert isinstance(full.spec, FullAttentionSpec)
    assert not any("blocks of" in note for note in found.notes)


def test_groups_may_run_on_different_backends() -> None:
    resolve = resolve_with(("FULL", full_only(16)), ("WINDOW", windowed(16)))
    found = select_model(gemma(), resolve)
    assert [group.selection.chosen for group in found.groups if group.selection] == [
        "WINDOW",
        "FULL",
    ]
    assert found.backends == ("WINDOW", "FULL")


def test_the_block_size_is_one_that_all_of_them_take() -> None:
    """FULL takes multiples of 64, WINDOW prefers 16 and takes its multiples."""
    resolve = resolve_with(("FULL", full_only(64)), ("WINDOW", windowed(16)))
    found = select_model(gemma(), resolve)
    assert found.block_size == 64
    assert found.backends == ("WINDOW", "FULL")
    (note,) = [note for note in found.notes if "suit all caches" in note]
    assert note == (
        "blocks of 64 tokens suit all caches; alone they would have: WINDOW 16, FULL 64"
    )
    assert {group.spec.block_size for group in found.groups if group.spec} == {64}


def test_it_may_be_a_common_multiple() -> None:
    resolve = resolve_with(("FULL", full_only(48)), ("WINDOW", windowed(32)))
    assert select_model(gemma(), resolve).block_size == 96


def test_a_choice_that_the_common_size_changes_is_said() -> None:
    """FULL takes blocks of 64 alone, WINDOW none over 48: full layers go to WINDOW as well."""
    narrow = capability(
        window=Support.YES, block_sizes=(16,), preferred_block_size=16, max_block_size=48
    )
    resolve = resolve_with(("FULL", full_only(64)), ("WINDOW", narrow))
    found = select_model(gemma(), resolve)
    assert (found.block_size, found.backends) == (16, ("WINDOW",))
    assert any("layers of full attention run on WINDOW: FULL" in note for note in found.notes)


def test_no_common_size_is_an_error_that_names_the_wishes() -> None:
    wide = capability(
        head_sizes=SizeSet.of(128), block_sizes=(64,), preferred_block_size=64, max_block_size=64
    )
    narrow = capability(
        window=Support.YES,
        block_sizes=(16,),
        preferred_block_size=16,
        max_block_size=16,
        head_sizes=SizeSet.of(64),
    )
    config = {**GEMMA, "per_layer_config": {"5": {"head_dim": 128}, "11": {"head_dim": 128}}}
    with pytest.raises(NoBackendError, match="no block size fits all groups") as caught:
        select_model(model_layers(config), resolve_with(("WIDE", wide), ("NARROW", narrow)))
    assert "window of 100: NARROW with 16" in caught.value.message
    assert "full attention: WIDE with 64" in caught.value.message


def test_a_callers_block_size_is_everyones() -> None:
    resolve = resolve_with(("ONE", windowed(16)))
    found = select_model(gemma(block_size=48), resolve)
    assert found.block_size == 48


def test_a_group_that_nothing_serves_is_named_and_holds_the_verdicts() -> None:
    with pytest.raises(NoBackendError, match=r"layers of window of 100: no backend") as caught:
        select_model(gemma(), resolve_with(("FULL", full_only(16))))
    assert caught.value.selection is not None
    assert caught.value.selection.verdict("FULL").reasons[0].code == "window"


def test_a_named_backend_serves_every_group_or_is_refused() -> None:
    resolve = resolve_with(
        ("FULL", full_only(16)), ("WINDOW", windowed(16)), policy=Policy(backend="WINDOW")
    )
    assert select_model(gemma(), resolve).backends == ("WINDOW",)
    resolve = resolve_with(
        ("FULL", full_only(16)), ("WINDOW", windowed(16)), policy=Policy(backend="FULL")
    )
    with pytest.raises(BackendRejectedError, match="layers of window of 100: backend FULL"):
        select_model(gemma(), resolve)


class TestMemory:
    """bfloat16 K and V of 2 heads of 64: 512 bytes a token and layer; 10 windows, 2 full."""

    def found(self) -> ModelSelection:
        return select_model(gemma(), resolve_with(("ONE", windowed(16))))

    def test_bytes_per_token(self) -> None:
        assert self.found().cache_bytes_per_token == 12 * 512
        assert self.found().long_bytes_per_token == 2 * 512

    @pytest.mark.parametrize(
        ("tokens", "blocks_of_windows", "blocks"), [(1, 1, 1), (100, 7, 7), (1000, 7, 63)]
    )
    def test_bytes_of_a_sequence_are_of_whole_blocks_and_windows_fill(
        self, tokens: int, blocks_of_windows: int, blocks: int
    ) -> None:
        page = 16 * 512
        expected = 10 * blocks_of_windows * page + 2 * blocks * page
        assert self.found().bytes_at(tokens) == expected

    def test_a_rank_keeps_its_share_of_a_sequence(self) -> None:
        sharded = capability(
            window=Support.YES,
            lse=Support.YES,
            dcp=Support.YES,
            block_sizes=(16,),
            preferred_block_size=16,
        )
        found = select_model(gemma(dcp_size=4), resolve_with(("ONE", sharded)))
        assert found.cache_bytes_per_token == 12 * 512 // 4
        # of 128 tokens a rank has 32, and 25 of a window's 100: two blocks each
        assert found.bytes_at(128) == 12 * 2 * 16 * 512

    def test_layers_without_a_cache_of_their_own_cost_nothing(self) -> None:
        config = {**GEMMA, "model_type": "gemma3n_text", "num_kv_shared_layers": 4}
        found = select_model(model_layers(config), resolve_with(("ONE", windowed(16))))
        assert found.cache_bytes_per_token == 8 * 512

    def test_a_latent_is_kept_once(self) -> None:
        served = capability(is_mla=True, head_sizes=SizeSet.of(576))
        found = select_model(model_layers(LATENT), resolve_with(("MLA", served)))
        assert isinstance(found.groups[0].spec, MLAAttentionSpec)
        assert found.cache_bytes_per_token == 3 * 576 * 2

    def test_states_are_per_sequence_and_a_common_pool_needs_larger_blocks(self) -> None:
        found = select_model(model_layers(HYBRID), resolve_with(("ONE", windowed(16))))
        scan, attention = found.groups
        state = (1024 * 3 + 1024 * 16) * 2  # two tensors of 1024 channels
        assert isinstance(scan.spec, MambaSpec)
        assert scan.spec.page_size_bytes == state
        assert found.state_bytes_per_sequence == 7 * state
        assert found.cache_bytes_per_token == attention.cache_bytes_per_token == 512
        # 38,912 bytes of state are 76 tokens of 512 bytes, 80 in whole blocks of 16
        assert any("needs blocks of 80 tokens" in note for note in found.notes)
        assert found.bytes_at(17) == 7 * state + 2 * 16 * 512

    def test_a_model_without_caches_has_no_block_size(self) -> None:
        config = {**GEMMA, "model_type": "bert"}
        served = capability(attn_types=frozenset({AttentionType.ENCODER_ONLY}))
        found = select_model(model_layers(config), resolve_with(("ONE", served)))
        assert (found.block_size, found.cache_bytes_per_token, found.bytes_at(9)) == (None, 0, 0)
        assert found.groups[0].spec is None


def test_the_answer_is_json_and_reads_as_lines() -> None:
    found = select_model(model_layers(HYBRID, tp_size=2), resolve_with(("ONE", windowed(16))))
    record = json.loads(json.dumps(found.to_dict()))
    assert record["model"] == {
        "model_type": "jamba",
        "tp_size": 2,
        "dtype": "bfloat16",
        "max_model_len": None,
    }
    assert record["backends"] == ["ONE"]
    scan, attention = record["groups"]
    assert (scan["chosen"], scan["state"]["kind"]) == (None, "MAMBA1")
    assert (attention["chosen"], attention["spec"]["shape"]) == ("ONE", [-1, 2, 16, 1, 64])
    assert record["bytes_at_max_model_len"] is None
    head, *lines = found.explain().splitlines()
    assert head == "jamba, 2 ranks: block_size=16, 256 bytes per token"
    assert lines[0].startswith("MAMBA1 state x7: ")
    assert lines[1].startswith("full attention x1: ONE chosen")


def test_asking_changes_nothing() -> None:
    resolve = resolve_with(("FULL", full_only(64)), ("WINDOW", windowed(16)))
    ask = partial(select_model, gemma(), resolve)
    assert ask().to_dict() == ask().to_dict()
