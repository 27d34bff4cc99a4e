from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from attn_cli.views.model import bytes_text, layer_ranges, model_brief, model_full
from attn_shared.device import preset
from attn_shared.model_config import model_layers
from attn_shared.model_selection import ModelSelection, select_model
from attn_shared.selection import Policy
from attn_shared.selector import DEFAULT_SELECTOR

HYBRID = {
    "model_type": "jamba",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def answer(config: dict[str, Any], **options: Any) -> ModelSelection:
    policy = Policy(backend="TORCH_SDPA")
    resolve = partial(DEFAULT_SELECTOR.resolve, device=preset("h200"), policy=policy)
    return select_model(model_layers(config, **options), resolve)


def rendered(view: Any, found: ModelSelection) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False)
    for part in view(found):
        console.print(part)
    return out.getvalue()


def test_a_hybrid_shows_its_states_beside_its_caches() -> None:
    text = rendered(model_brief, answer(HYBRID, tp_size=2))
    assert text.startswith("TORCH_SDPA\njamba, a rank of 2, bfloat16 on NVIDIA H200 (sm_90)\n")
    # on 2 ranks: 512 channels, 3 of a convolution and 16 of a scan each, in 7 layers
    assert "7        recurrent" in text
    assert "MAMBA1 state, 133 KiB per sequence" in text
    assert "cache: 256 bytes per token and rank\n" in text
    assert "states: 133 KiB per sequence and rank\n" in text
    assert "a sequence of 4096 tokens: 1.13 MiB" in text


def test_the_full_view_says_that_nothing_is_chosen_for_a_state() -> None:
    text = rendered(model_full, answer(HYBRID))
    assert "MAMBA1 state, layers 0-3, 5-7" in text
    assert "no backend is chosen" in text
    assert "full attention, layers 4\nAsked: 8 query heads, 2 kv heads" in text


def test_a_model_without_attention_needs_no_backend() -> None:
    config = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64}
    text = rendered(model_brief, answer(config))
    assert text.startswith("no backend is needed\nmamba, 1 rank, bfloat16\n")


def test_an_encoder_caches_nothing() -> None:
    config = {**HYBRID, "model_type": "bert"}
    assert "nothing is cached" in rendered(model_brief, answer(config))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1 MiB"),
        (5 * 2**30, "5 GiB"),
    ],
)
def test_bytes_have_their_unit(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("layers", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((0, 2, 4, 5, 6, 9), "0, 2, 4-6, 9")],
)
def test_numbers_in_a_row_are_a_range(layers: tuple[int, ...], text: str) -> None:
    assert layer_ranges(layers) == text
