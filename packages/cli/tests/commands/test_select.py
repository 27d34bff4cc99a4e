from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from attn_shared.device import PRESETS
from attn_shared.selector import DEFAULT_SELECTOR
from attn_shared.settings import VARIABLES

MODEL = ("--head-size", "128", "--num-heads", "32", "--num-kv-heads", "8", "--block-size", "16")


@pytest.mark.parametrize("device", PRESETS)
def test_every_preset_answers(attn: Any, device: str) -> None:
    answer = attn.json("select", "--device", device, *MODEL, "--dtype", "bfloat16")
    assert answer["schema_version"] == 1
    assert answer["chosen"] is not None
    assert answer["kv_layout"] in ("NHD", "HND")
    assert answer["decided_by"] == "default"
    assert answer["device"]["arch"] == PRESETS[device].arch
    chosen = [v["name"] for v in answer["verdicts"] if v["status"] == "chosen"]
    assert chosen == [answer["chosen"]]
    for verdict in answer["verdicts"]:
        for reason in verdict["reasons"]:
            assert reason.keys() == {"code", "value", "allowed", "hint"}


@pytest.mark.parametrize("name", ["TORCH_SDPA", "FLEX_ATTENTION"])
def test_the_torch_backends_are_candidates_everywhere(attn: Any, name: str) -> None:
    for device in ("h200", "mi300x", "b60", "spr"):
        answer = attn.json("select", "--device", device, *MODEL)
        assert name in {v["name"] for v in answer["verdicts"]}


def test_without_a_device_it_asks_this_machine(attn: Any) -> None:
    answer = attn.json("select", *MODEL)
    here = DEFAULT_SELECTOR.current_platform().device()
    assert answer["device"]["name"] == here.name
    assert not answer["device"]["is_simulated"]


def test_a_simulated_device_is_said_to_be_one(attn: Any) -> None:
    notes = attn.json("select", "--device", "h200", *MODEL)["notes"]
    assert any("simulated" in note and "NVIDIA H200" in note for note in notes)


def test_quiet_prints_the_name_alone(attn: Any) -> None:
    chosen = attn.json("select", "--device", "h200", *MODEL)["chosen"]
    result = attn("select", "--device", "h200", *MODEL, "--quiet")
    assert (result.stdout, result.stderr) == (f"{chosen}\n", "")


def test_select_shows_the_choice_and_a_line_per_candidate(attn: Any) -> None:
    result = attn("select", "--device", "h200", *MODEL, "--backend", "TORCH_SDPA")
    lines = result.stdout.splitlines()
    assert lines[0] == "TORCH_SDPA on NVIDIA H200 (sm_90)"
    assert "block size 16" in lines[1]
    assert "the user (option --backend)" in lines[1]
    assert any(re.match(r"FLEX_ATTENTION +eligible", line) for line in lines)
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["select", "explain"])
def test_a_block_that_the_named_backend_does_not_take(
    attn: Any, paged16: str, command: str
) -> None:
    words = (command, "--device", "spr", "--head-size", "64", "--num-heads", "4")
    answer = attn.json(*words, "--block-size", "15", "--backend", paged16, code=3)
    assert answer["error"]["class"] == "BackendRejectedError"
    assert "15" in answer["error"]["message"]
    assert "multiple of 16" in answer["error"]["message"]
    assert "TORCH_SDPA" in answer["error"]["hint"]
    verdict = next(v for v in answer["verdicts"] if v["name"] == paged16)
    assert verdict["status"] == "rejected"
    (reason,) = verdict["reasons"]
    assert (reason["code"], reason["value"]) == ("block_size", "15")
    assert "multiple of 16" in reason["allowed"]
    assert reason["hint"]


def test_explain_shows_every_part_of_every_reason(attn: Any, paged16: str) -> None:
    words = ("explain", "--device", "spr", "--head-size", "80", "--num-heads", "4")
    result = attn(*words, "--block-size", "15", "--softcap", "30")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "Asked: 4 query heads, 4 kv heads, head size 80, bfloat16" in text
    assert "block_size=15, softcap=30.0" in text
    assert "head_size = 80 allowed: 64, 128" in text
    assert "block_size = 15 allowed: a multiple of 16 hint: " in text
    assert "softcap = 30.0 allowed: " in text


def test_where_nothing_fits_the_verdicts_are_shown(attn: Any) -> None:
    words = ("explain", "--device", "h200", *MODEL, "--kv-cache-dtype", "nvfp4")
    result = attn(*words)
    assert result.exit_code == 3
    assert result.stdout.startswith("Asked: ")
    assert "No backend on NVIDIA H200 (sm_90)" in result.stdout
    assert "kv_cache_dtype = nvfp4" in result.stdout
    assert result.stderr.startswith("Error: no backend serves this request on NVIDIA H200")
    quiet = attn(*words, "--quiet")
    assert (quiet.exit_code, quiet.stdout) == (3, "")


def test_a_brief_answer_promises_no_more_than_it_shows(attn: Any) -> None:
    words = ("--device", "h200", *MODEL, "--kv-cache-dtype", "nvfp4")
    short = attn("select", *words)
    assert "allowed" not in short.stdout
    assert (
        "Hint: attn explain, with the same options, says of each what is allowed." in short.stderr
    )
    assert "allowed" in attn("explain", *words).stdout
    hint = attn.json("select", *words, code=3)["error"]["hint"]  # whose verdicts have them
    assert hint == "each line of a rejected one names the value and what is allowed."


def test_where_nothing_fits_json_has_the_verdicts(attn: Any, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    words = ("select", "--device", "h200", *MODEL, "--kv-cache-dtype", "nvfp4")
    answer = attn.json(*words, "--output", str(path), code=3)
    assert answer["error"]["class"] == "NoBackendError"
    assert all(v["status"] == "rejected" and v["reasons"] for v in answer["verdicts"])
    assert json.loads(path.read_text()) == answer


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--backend", "FLASH_ATTENTION_9"), 2, "unknown backend 'FLASH_ATTENTION_9'; allowed: "),
        (("--device", "h20000"), 2, "unknown device 'h20000'; allowed: a preset (a100, "),
        (("--device", "sm_90x"), 2, "unknown device 'sm_90x'"),
        (("--device", "cpu:99"), 2, "device index is 99"),
        (("--dtype", "int3"), 2, "unknown dtype 'int3'; allowed: bfloat16, float16, float32"),
        (("--head-size", "0"), 2, "head_size=0 is not allowed"),
        (("--head-size", "-1"), 2, "head_size=-1 is not allowed"),
        (("--num-heads", "10", "--num-kv-heads", "4"), 2, "a divisor of num_heads=10"),
        (("--block-size", "0"), 2, "block_size=0 is not allowed"),
        (("--block-size", "-16"), 2, "block_size=-16 is not allowed"),
        (("--backend", "NO_ATTENTION"), 3, "'NO_ATTENTION'"),
    ],
)
def test_bad_input(attn: Any, words: tuple[str, ...], code: int, message: str) -> None:
    result = attn("select", *MODEL, *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    answer = attn.json("select", *MODEL, *words, code=code)
    assert message in answer["error"]["message"]
    assert answer["error"]["exit_code"] == code


def test_a_misspelt_name_is_corrected(attn: Any) -> None:
    hint = attn.json("select", *MODEL, "--backend", "TORCH_SDAP", code=2)["error"]["hint"]
    assert "'TORCH_SDPA'" in hint


class TestEnvironment:
    def test_it_names_the_backend_and_is_reported(
        self, attn: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ATTN_BACKEND", "FLEX_ATTENTION")
        answer = attn.json("select", "--device", "h200", *MODEL)
        assert (answer["chosen"], answer["decided_by"]) == ("FLEX_ATTENTION", "user")
        assert any("environment variable ATTN_BACKEND" in note for note in answer["notes"])
        assert answer["settings"]["backend"] == "FLEX_ATTENTION"
        table = attn("select", "--device", "h200", *MODEL)
        assert "environment variable ATTN_BACKEND" in table.stdout
        assert "ATTN_BACKEND=FLEX_ATTENTION is set" in table.stderr

    @pytest.mark.parametrize(
        ("option", "chosen", "decided_by"),
        [("auto", "CPU_ATTN", "default"), ("TORCH_SDPA", "TORCH_SDPA", "user")],
    )
    def test_an_option_wins(
        self,
        attn: Any,
        monkeypatch: pytest.MonkeyPatch,
        option: str,
        chosen: str,
        decided_by: str,
    ) -> None:
        monkeypatch.setenv("ATTN_BACKEND", "FLEX_ATTENTION")
        answer = attn.json("select", "--device", "genericcpu", *MODEL, "--backend", option)
        assert (answer["chosen"], answer["decided_by"]) == (chosen, decided_by)

    def test_a_name_that_nobody_provides_is_refused(
        self, attn: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ATTN_BACKEND", "TORCH_SPDA")
        answer = attn.json("select", *MODEL, code=2)
        assert "unknown backend 'TORCH_SPDA'" in answer["error"]["message"]

    def test_a_variable_that_means_nothing_is_named(
        self, attn: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ATTN_BAKEND", "TORCH_SDPA")
        result = attn("select", *MODEL, "--json")
        assert "ATTN_BAKEND is set and unknown" in result.stderr
        assert all(name in result.stderr for name in VARIABLES)
        assert json.loads(result.stdout)["chosen"]

    def test_a_value_that_a_variable_cannot_have(
        self, attn: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ATTN_CHECKED", "perhaps")
        answer = attn.json("select", *MODEL, code=2)
        assert "ATTN_CHECKED='perhaps'" in answer["error"]["message"]


def test_a_layer_of_latents_says_who_prefills_it(attn: Any) -> None:
    asked = ("--device", "spr", "--mla", "--num-heads", "16")
    answer = attn.json("select", *asked)
    assert answer["prefill"]["chosen"] == "CPU_ATTN"
    assert {verdict["name"] for verdict in answer["prefill"]["verdicts"]} >= {"TORCH_SDPA"}
    text = attn("select", *asked).stdout
    assert "CPU_ATTN prefills" in text
    assert "TORCH_SDPA" in attn("explain", *asked).stdout
    assert "prefill" not in attn.json(
        "select", "--device", "spr", "--num-heads", "8", "--head-size", "64"
    )
