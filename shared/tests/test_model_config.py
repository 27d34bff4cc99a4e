from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.errors import AttnError, InvalidInputError, InvalidRequestError, UnknownNameError
from attn_shared.model_config import (
    MODEL_TYPES,
    LayerGroup,
    ModelLayers,
    load_config,
    model_layers,
)
from attn_shared.request import AttentionRequest, AttentionType, MLADims

CONFIGS = Path(__file__).parent / "model_configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def read(name: str, **options: Any) -> ModelLayers:
    return model_layers(load_config(CONFIGS / f"{name}.json"), **options)


def only(groups: Iterable[LayerGroup]) -> LayerGroup:
    (group,) = groups
    return group


def asked(group: LayerGroup) -> AttentionRequest:
    assert group.request is not None
    return group.request


def shapes(group: LayerGroup) -> tuple[tuple[int, ...], ...]:
    assert group.state is not None
    return group.state.shapes


class TestDecoders:
    def test_heads_are_divided_among_ranks(self) -> None:
        model = read("llama-3-8b", tp_size=4)
        group = only(model.groups)
        assert group.layers == tuple(range(32))
        assert group.name == "full attention"
        assert group.request == AttentionRequest(
            num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16
        )
        assert (model.max_model_len, model.dtype) == (8192, torch.bfloat16)

    def test_kv_heads_are_replicated_where_there_are_fewer_than_ranks(self) -> None:
        model = read("llama-3-8b", tp_size=32)
        assert (asked(model.groups[0]).num_heads, asked(model.groups[0]).num_kv_heads) == (1, 1)
        assert model.notes == ("8 kv heads on 32 ranks: each is held by 4 of them",)

    def test_a_window_that_is_switched_off_is_none(self) -> None:
        assert only(read("qwen2.5-7b").groups).name == "full attention"
        assert only(read("mixtral-8x7b").groups).name == "full attention"

    def test_a_window_from_some_layer_on(self) -> None:
        changes = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 5}
        config = {**LLAMA, "model_type": "qwen2", "num_hidden_layers": 7, **changes}
        full, window = model_layers(config).groups
        assert (full.layers, window.layers) == ((0, 1, 2, 3, 4), (5, 6))
        assert asked(window).window == (63, 0)

    def test_a_window_on_every_layer_counts_the_querys_own_key(self) -> None:
        assert asked(only(read("mistral-7b-v0.1").groups)).window == (4095, 0)
        phi = asked(only(read("phi-3-mini-4k").groups))
        assert (phi.window, phi.head_size) == ((2046, 0), 96)

    def test_a_window_as_long_as_the_model_hides_nothing(self) -> None:
        config = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
        model = model_layers(config)
        assert only(model.groups).name == "full attention"
        assert "a window of 4096 hides nothing" in model.notes[0]
        longer = model_layers(config, max_model_len=8192)
        assert only(longer.groups).name == "window of 4096"

    def test_gemma_2_has_windows_in_turn_and_a_cap(self) -> None:
        window, full = read("gemma-2-9b").groups
        assert (window.layers[:3], full.layers[:3]) == ((0, 2, 4), (1, 3, 5))
        assert {asked(group).softcap for group in (window, full)} == {50.0}
        assert asked(full).head_size == 256

    def test_gemma_3s_text_model_and_the_ranges_of_its_images(self) -> None:
        model = read("gemma-3-27b")
        window, full = model.groups
        assert (len(window.layers), full.layers[:2]) == (52, (5, 11))
        assert asked(full).use_mm_prefix
        assert asked(window).softcap is None
        assert any("text model of gemma3" in note for note in model.notes)

    def test_gemma_4_has_wider_heads_in_full_layers(self) -> None:
        window, full = read("gemma-4-text").groups
        assert (asked(window).head_size, asked(full).head_size) == (256, 512)
        assert full.layers == (5, 11, 17, 23, 29)

    def test_gemma_4_with_kv_heads_of_its_full_layers_own(self) -> None:
        config = load_config(CONFIGS / "gemma-4-text.json")
        own = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
        _, full = model_layers({**config, **own}).groups
        assert asked(full).num_kv_heads == 2
        _, without = model_layers({**config, "num_global_key_value_heads": 2}).groups
        assert asked(without).num_kv_heads == 4

    def test_widths_of_single_layers_make_groups_of_their_own(self) -> None:
        config = {**LLAMA, "per_layer_config": {"1": {"head_dim": 128}}}
        narrow, wide = model_layers(config).groups
        assert (narrow.name, wide.name) == (
            "full attention, head size 64",
            "full attention, head size 128",
        )
        assert wide.layers == (1,)

    def test_layers_that_read_an_earlier_layers_cache_have_none(self) -> None:
        config = {**LLAMA, "model_type": "gemma3n_text", "num_hidden_layers": 10}
        config |= {"num_kv_shared_layers": 4, "sliding_window": 64}
        window, full = model_layers(config).groups
        assert (window.sharing_layers, full.sharing_layers) == ((6, 7, 8), (9,))
        assert (window.num_caches, full.num_caches) == (5, 1)

    def test_gpt_oss_has_sinks_and_windows_in_turn(self) -> None:
        window, full = read("gpt-oss-20b").groups
        assert asked(window).has_sinks
        assert asked(full).has_sinks
        assert (asked(window).window, asked(full).window) == ((127, 0), (None, None))

    def test_llama_4_has_chunks_but_for_layers_without_positions(self) -> None:
        chunks, full = read("llama-4-scout", max_model_len=65536).groups
        assert asked(chunks).chunk_size == 8192
        assert full.layers[:2] == (3, 7)

    def test_listed_layers_win_over_the_familys_rule(self) -> None:
        kinds = ["full_attention", "sliding_attention"]
        config = {**LLAMA, "model_type": "gpt_oss", "sliding_window": 64, "layer_types": kinds}
        full, window = model_layers(config).groups
        assert (full.layers, window.layers) == ((0,), (1,))

    def test_a_bias_of_distance_is_alibi(self) -> None:
        assert asked(only(read("bloom-7b1").groups)).has_alibi

    @pytest.mark.parametrize(
        ("changes", "kv_heads", "alibi"),
        [
            ({}, 1, False),
            ({"alibi": True}, 1, True),
            ({"new_decoder_architecture": True, "num_kv_heads": 4}, 4, False),
            ({"multi_query": False}, 8, False),
        ],
    )
    def test_falcons_kv_heads(self, changes: Any, kv_heads: int, alibi: bool) -> None:
        config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
        request = asked(only(model_layers({**config, "model_type": "falcon", **changes}).groups))
        assert (request.num_kv_heads, request.has_alibi) == (kv_heads, alibi)


class TestLatentAttention:
    def test_deepseek_v3_has_one_latent_of_576_for_all_heads(self) -> None:
        request = asked(only(read("deepseek-v3", tp_size=8).groups))
        assert request.mla == MLADims(q_lora_rank=1536)
        assert (request.num_heads, request.num_kv_heads, request.head_size) == (16, 1, 576)
        assert not request.use_sparse

    def test_an_indexer_makes_it_sparse(self) -> None:
        request = asked(only(read("deepseek-v3.2").groups))
        assert (request.use_sparse, request.index_topk) == (True, 2048)


class TestEncoders:
    def test_bert_sees_everything_and_keeps_nothing(self) -> None:
        model = read("bert-base")
        assert asked(only(model.groups)).attn_type is AttentionType.ENCODER_ONLY
        assert model.notes == ("the config names no dtype; bfloat16 is assumed",)

    def test_modernberts_window_has_two_equal_sides(self) -> None:
        full, window = read("modernbert-base").groups
        assert (full.layers[:2], asked(window).window) == ((0, 3), (64, 64))

    def test_a_decoder_whose_mask_is_taken_off(self) -> None:
        config = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 6}
        config |= {"use_bidirectional_attention": True, "sliding_window": 512}
        window, full = model_layers(config).groups
        assert asked(window).window == (256, 256)
        assert asked(full).attn_type is AttentionType.ENCODER_ONLY

    def test_whisper_has_three_kinds_of_attention(self) -> None:
        types = [asked(group).attn_type for group in read("whisper-large-v3").groups]
        assert types == [
            AttentionType.ENCODER,
            AttentionType.DECODER,
            AttentionType.ENCODER_DECODER,
        ]


class TestRecurrentLayers:
    def test_jambas_scans_and_attention(self) -> None:
        scan, attention = read("jamba-v0.1", tp_size=2).groups
        assert attention.layers == (4, 12, 20, 28)
        assert shapes(scan) == ((4096, 3), (4096, 16))  # 2 * 4096 channels on 2 ranks
        assert scan.request is None

    def test_bambas_chunked_scan_keeps_its_one_group_on_every_rank(self) -> None:
        scan, attention = read("bamba-9b", tp_size=4).groups
        assert attention.layers == (9, 18, 27)
        assert shapes(scan) == ((2048 + 2 * 128, 3), (32, 64, 128))
        assert scan.name == "MAMBA2 state"

    def test_nemotrons_pattern(self) -> None:
        scan, attention = read("nemotron-h-8b", tp_size=2).groups
        assert (len(scan.layers), attention.layers) == (24, (7, 18, 29, 40))
        assert shapes(scan) == ((4096 + 2 * 4 * 128, 3), (64, 64, 128))

    def test_falcon_h1_has_both_in_every_layer(self) -> None:
        scan, attention = read("falcon-h1-7b").groups
        assert scan.layers == attention.layers == tuple(range(44))

    def test_qwen3_nexts_delta_net(self) -> None:
        net, attention = read("qwen3-next-80b", tp_size=2).groups
        assert shapes(net) == ((4096, 3), (16, 128, 128))
        assert attention.layers[:2] == (3, 7)

    def test_lfm2s_convolution(self) -> None:
        conv, attention = read("lfm2-1.2b").groups
        assert shapes(conv) == ((2048, 2),)
        assert attention.layers == (2, 5, 8, 10, 12, 14)

    def test_the_states_dtype_is_the_models_unless_the_config_says(self) -> None:
        config = load_config(CONFIGS / "nemotron-h-8b.json")
        plain = model_layers(config).groups[0].state
        wide = model_layers({**config, "mamba_ssm_cache_dtype": "float32"}).groups[0].state
        assert plain is not None
        assert wide is not None
        assert plain.dtypes == (torch.bfloat16, torch.bfloat16)
        assert wide.dtypes == (torch.bfloat16, torch.float32)
        # 128 * 64 channels and 2 * 8 * 128 of the groups, 3 each; 128 heads of 64 by 128
        assert wide.num_bytes == (8192 + 2048) * 3 * 2 + 128 * 64 * 128 * 4

    def test_a_model_of_scans_alone_asks_no_backend(self) -> None:
        config = {"model_type": "mamba", "num_hidden_layers": 4, "hidden_size": 64}
        model = model_layers(config)
        assert model.attention_groups == ()
        assert shapes(model.groups[0]) == ((128, 3), (128, 16))


class TestOptions:
    def test_the_callers_dtype_wins(self) -> None:
        assert asked(read("llama-3-8b", dtype="float16").groups[0]).dtype is torch.float16

    def test_options_reach_every_group(self) -> None:
        model = read("gemma-2-9b", kv_cache_dtype="fp8", block_size=32, batch_invariant=True)
        for group in model.groups:
            request = asked(group)
            assert (request.kv_cache_dtype, request.block_size) == ("fp8", 32)
            assert request.batch_invariant

    @pytest.mark.parametrize("tp_size", [0, 3, 64])
    def test_ranks_that_heads_do_not_divide_among(self, tp_size: int) -> None:
        with pytest.raises(InvalidRequestError, match=f"tp_size={tp_size}"):
            read("llama-3-8b", tp_size=tp_size)

    def test_ranks_that_a_scan_does_not_divide_among(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"tp_size=16 .*the scan's groups=8"):
            read("nemotron-h-8b", tp_size=16)


class TestBadConfigs:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"model_type": None}, r"model_type in the config is missing; allowed: .*llama"),
            ({"model_type": 3}, "model_type in the config is 3"),
            ({"num_attention_heads": None}, "num_attention_heads or n_head"),
            ({"num_attention_heads": 0}, "num_attention_heads in the config is 0"),
            ({"num_hidden_layers": "2"}, "num_hidden_layers in the config is '2'"),
            ({"hidden_size": None}, r"hidden_size or .* is missing"),
            ({"hidden_size": 511}, "a multiple of 8 heads where there is no head_dim"),
            ({"head_dim": -1}, "head_dim in the config is -1"),
            ({"layer_types": ["full_attention"]}, "one entry for each of 2 layers"),
            ({"layer_types": ["full_attention", "odd"]}, r"layer_types in the config is 'odd'"),
            ({"layer_types": ["linear_attention"] * 2}, "'linear_attention'; allowed: chunked"),
            ({"layer_types": ["sliding_attention"] * 2}, "sliding_window in the config is missing"),
            ({"num_kv_shared_layers": 2}, "less than the 2 layers"),
            ({"max_position_embeddings": -1}, "max_position_embeddings in the config is -1"),
            ({"layer_types": ["mlp", "mlp"]}, "at least one layer"),
        ],
    )
    def test_a_key_is_named_with_its_value_and_what_is_allowed(
        self, changes: Any, words: str
    ) -> None:
        with pytest.raises(InvalidInputError, match=words):
            model_layers({**LLAMA, **changes})

    def test_a_number_of_kv_heads_that_does_not_divide(self) -> None:
        with pytest.raises(InvalidRequestError, match="a divisor of num_heads=8"):
            model_layers({**LLAMA, "num_key_value_heads": 3})

    def test_a_dtype_that_nobody_knows(self) -> None:
        with pytest.raises(UnknownNameError, match="unknown dtype 'float8'"):
            model_layers({**LLAMA, "torch_dtype": "float8"})

    def test_a_type_that_nobody_knows_is_listed_with_those_known(self) -> None:
        with pytest.raises(UnknownNameError, match=r"unknown model_type 'lama'.*'llama'"):
            model_layers({**LLAMA, "model_type": "lama"})

    @pytest.mark.parametrize(
        ("model_type", "words"),
        [("t5", "a learned bias per distance"), ("deepseek_v4", "no backend serves yet")],
    )
    def test_a_type_that_cannot_be_served_is_told_why(self, model_type: str, words: str) -> None:
        with pytest.raises(InvalidInputError, match=words):
            model_layers({"model_type": model_type})

    def test_a_model_of_parts_needs_its_text_model(self) -> None:
        with pytest.raises(InvalidInputError, match="text_config in the config is missing"):
            model_layers({"model_type": "gemma3"})
        with pytest.raises(UnknownNameError, match="model_type of text_config 'odd'"):
            model_layers({"model_type": "gemma3", "text_config": {"model_type": "odd"}})

    def test_a_text_model_of_no_type_is_the_usual_one(self) -> None:
        parts = {"model_type": "llava", "text_config": {**LLAMA, "model_type": None}}
        assert model_layers(parts).groups == model_layers(LLAMA).groups

    @pytest.mark.parametrize("length", [0, -5])
    def test_a_longest_sequence_that_is_no_count(self, length: int) -> None:
        with pytest.raises(InvalidRequestError, match=f"max_model_len={length} .*an int >= 1"):
            model_layers(LLAMA, max_model_len=length)

    def test_patterns_of_other_letters(self) -> None:
        config = load_config(CONFIGS / "nemotron-h-8b.json")
        with pytest.raises(InvalidInputError, match="52 letters, each one of M"):
            model_layers({**config, "hybrid_override_pattern": "MX"})

    def test_a_scan_whose_heads_do_not_make_its_width(self) -> None:
        config = load_config(CONFIGS / "bamba-9b.json")
        with pytest.raises(InvalidInputError, match="mamba_n_heads in the config is 100"):
            model_layers({**config, "mamba_n_heads": 100})


def test_the_shipped_configs_cover_what_is_promised() -> None:
    types = {load_config(CONFIGS / f"{name}.json")["model_type"] for name in NAMES}
    assert types <= set(MODEL_TYPES)
    assert len(types) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_of_a_shipped_model_is_in_a_group(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.json")
    text = config.get("text_config", config)
    layers = {layer for group in read(name).groups for layer in group.layers}
    if name.startswith("nemotron"):  # has layers of feed-forward alone
        pattern = enumerate(text["hybrid_override_pattern"])
        assert layers == {layer for layer, letter in pattern if letter in "M*"}
    else:
        total = text.get("num_hidden_layers") or text.get("n_layer") or text["decoder_layers"]
        assert layers == set(range(total))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 3) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2),
)


@given(name=st.sampled_from(NAMES), data=st.data())
@settings(derandomize=True, max_examples=300, deadline=None)
def test_an_odd_value_is_read_or_refused_in_words(name: str, data: st.DataObject) -> None:
    """Whatever stands in a config, only an error of attn comes out of it."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    target = config.get("text_config", config)
    key = data.draw(st.sampled_from(sorted(target)))
    target[key] = data.draw(JUNK)
    tp_size = data.draw(st.sampled_from([1, 2, 3]))
    with contextlib.suppress(AttnError):
        assert model_layers(config, tp_size=tp_size).groups
