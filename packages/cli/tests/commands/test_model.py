from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CONFIGS = Path(__file__).parents[4] / "shared/tests/model_configs"
CONFIG = {
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 64,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def changed(folder: str, **changes: Any) -> str:
    path = Path(folder) / "changed.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def test_one_call_answers_for_the_whole_model(attn: Any, model: str) -> None:
    answer = attn.json("select", "--model", model, "--tp", "2", "--device", "h200")
    assert answer["schema_version"] == 1
    assert answer["model"]["tp_size"] == 2
    window, full = answer["groups"]
    assert (window["layers"], full["layers"]) == ([0, 2], [1, 3])
    assert window["request"]["window"] == [63, 0]
    assert {group["request"]["softcap"] for group in answer["groups"]} == {50.0}
    assert answer["backends"] == sorted({window["chosen"], full["chosen"]})
    # K and V of one kv head of 64 in bfloat16: 256 bytes a token and layer
    assert answer["cache_bytes_per_token"] == 4 * 256
    assert answer["long_bytes_per_token"] == 2 * 256
    assert answer["settings"]["backend"] is None
    for group in answer["groups"]:
        assert group["spec"]["block_size"] == answer["block_size"]
        assert {v["status"] for v in group["selection"]["verdicts"]} >= {"chosen"}


def test_a_line_per_group_and_what_the_caches_cost(attn: Any, model: str) -> None:
    result = attn("select", "--model", model, "--device", "h200", "--backend", "TORCH_SDPA")
    lines = result.stdout.splitlines()
    assert lines[0] == "TORCH_SDPA"
    assert lines[1] == "gemma2, 1 rank, bfloat16 on NVIDIA H200 (sm_90)"
    text = " ".join(result.stdout.split())
    assert "window of 64, 8/2 kv heads of 64, softcap 50, keeps 64 tokens" in text
    assert "cache: 2 KiB per token and rank, 1 KiB once the windows are full" in text
    assert (result.exit_code, result.stderr) == (0, "")


def test_explain_shows_the_verdicts_of_each_group(attn: Any, model: str) -> None:
    text = attn("explain", "--model", model, "--device", "h200").stdout
    assert "window of 64, layers 0, 2" in text
    assert "full attention, layers 1, 3" in text
    assert text.count("Asked: ") == 2


def test_quiet_prints_each_backend_once(attn: Any, model: str) -> None:
    words = ("select", "--model", model, "--device", "h200", "--backend", "TORCH_SDPA", "-q")
    assert attn(*words).stdout == "TORCH_SDPA\n"


def test_without_a_device_it_asks_this_machine(attn: Any, model: str) -> None:
    answer = attn.json("select", "--model", model)
    assert not answer["groups"][0]["selection"]["device"]["is_simulated"]


def test_a_group_that_nothing_serves_is_named_with_its_verdicts(attn: Any, model: str) -> None:
    words = ("select", "--model", model, "--device", "h200", "--kv-cache-dtype", "nvfp4")
    answer = attn.json(*words, code=3)
    assert answer["error"]["message"].startswith("layers of window of 64: no backend serves")
    assert answer["verdicts"]
    shown = attn(*words)
    assert "kv_cache_dtype nvfp4" in shown.stdout
    assert shown.exit_code == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": None}, "num_attention_heads or n_head or"),
        ({"head_dim": "64"}, "head_dim in the config is '64'; allowed: an integer >= 1"),
        ({"model_type": "lama"}, "unknown model_type 'lama'; allowed: bamba"),
        ({"model_type": "t5"}, "a learned bias per distance and head"),
        ({"num_key_value_heads": 3}, "a divisor of num_heads=8"),
    ],
)
def test_an_odd_config_is_named(attn: Any, model: str, changes: Any, words: str) -> None:
    answer = attn.json("select", "--model", changed(model, **changes), code=2)
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "nowhere.json"), "No such file"),
        (("--head-size", "64"), "--num-heads is missing"),
    ],
)
def test_bad_input(attn: Any, words: tuple[str, ...], message: str) -> None:
    result = attn("select", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_flag_of_the_models_own_is_refused(attn: Any, model: str) -> None:
    answer = attn.json("select", "--model", model, "--head-size", "64", code=2)
    assert "--head-size is given together with --model" in answer["error"]["message"]


def test_ranks_that_heads_do_not_divide_among(attn: Any, model: str) -> None:
    answer = attn.json("select", "--model", model, "--tp", "3", code=2)
    assert "tp_size=3 is not allowed; allowed: a divisor of" in answer["error"]["message"]


def test_latent_layers_say_who_prefills_them(attn: Any) -> None:
    path = str(CONFIGS / "deepseek-v3.json")
    answer = attn.json("select", "--device", "spr", "--model", path)
    (group,) = answer["groups"]
    assert (group["chosen"], group["prefill"]) == ("CPU_MLA", "CPU_ATTN")
    assert group["request"]["mla"]["kv_lora_rank"] == 512
    text = " ".join(attn("select", "--device", "spr", "--model", path).stdout.split())
    assert "latent attention, 128/1 latent heads of 576, prefilled by CPU_ATTN" in text
