from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("attn_bench", reason="attn-bench is not installed")

from attn_bench.machine import describe_machine, installed_versions
from attn_bench.results import Cell, Results, Settings, write_results
from attn_cli.tuned import known_libraries, measured_policy, table_path, torch_device
from attn_shared.device import DeviceFacts, preset
from attn_shared.request import AttentionRequest
from attn_shared.selection import Policy
from attn_shared.selector import DEFAULT_SELECTOR
from attn_shared.settings import Settings as Environment

REQUEST = AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64)


def cpu() -> DeviceFacts:
    import torch

    return DEFAULT_SELECTOR.device_facts(torch.device("cpu"))


def table(**changes: Any) -> Results:
    """FLEX_ATTENTION takes half of TORCH_SDPA's time here, at one decode and one prefill."""
    cell = Cell(
        backend="TORCH_SDPA",
        peer="FLEX_ATTENTION",
        phase="decode",
        label="1x64",
        batch=1,
        context=64,
        query_len=1,
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        dtype="bfloat16",
        kv_cache_dtype="auto",
        block_size=16,
        shared_prefix_len=0,
        time_us=2.0,
        interval_us=(2.0, 2.0),
        peer_time_us=1.0,
        peer_interval_us=(1.0, 1.0),
        ratio=2.0,
        ratio_interval=(2.0, 2.0),
        gb_per_s=1.0,
        tflop_per_s=1.0,
        share_of_read=0.1,
        share_of_matmul=0.1,
        host_us=None,
        plan_us=1.0,
        cache_state="cold",
        mode="eager",
        peer_mode="eager",
        rounds=3,
    )
    results = Results(
        date="2026-11-30T10:00:00Z",
        machine=describe_machine(torch_device(cpu())),
        versions=installed_versions(),
        settings=Settings(rounds=3),
        cells=(cell, replace(cell, phase="prefill", query_len=64)),
    )
    return replace(results, **changes)


@pytest.fixture
def here(tmp_path: Path) -> Environment:
    return Environment(cache_dir=tmp_path)


def write(results: Results, here: Environment) -> Path:
    path = table_path(cpu(), here)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_results(results, path)
    return path


def policy(here: Environment, request: AttentionRequest = REQUEST) -> Policy:
    return measured_policy(Policy(), cpu(), here)(request)


def test_a_table_has_its_devices_name(tmp_path: Path) -> None:
    path = table_path(preset("h200"), Environment(cache_dir=tmp_path))
    assert path == tmp_path / "tuned" / "nvidia-h200-sm-90.json"


def test_without_a_table_the_policy_is_as_it_was(here: Environment) -> None:
    assert policy(here) == Policy()


def test_what_was_measured_is_in_the_policy_and_said(here: Environment) -> None:
    path = write(table(), here)
    found = policy(here)
    assert found.measured == ("FLEX_ATTENTION", "TORCH_SDPA")
    assert found.remarks == (
        f"measured by attn tune on 2026-11-30: FLEX_ATTENTION, TORCH_SDPA ({path})",
    )


def test_a_request_that_was_not_measured_is_not_decided_by_it(here: Environment) -> None:
    write(table(), here)
    assert policy(here, REQUEST.with_options(head_size=128)) == Policy()


def test_a_table_of_other_versions_is_left_aside_and_that_is_said(here: Environment) -> None:
    write(table(versions={**installed_versions(), "torch": "1.0"}), here)
    found = policy(here)
    assert found.measured == ()
    assert "left aside" in found.remarks[0]
    assert "it is of torch 1.0" in found.remarks[0]


def test_a_table_of_another_device_is_left_aside(here: Environment) -> None:
    machine = replace(describe_machine(torch_device(cpu())), name="Other CPU")
    write(table(machine=machine), here)
    assert "it is of name Other CPU" in policy(here).remarks[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 99}', "\x00"])
def test_a_file_that_is_no_table_is_left_aside(here: Environment, text: str) -> None:
    path = write(table(), here)
    path.write_text(text)
    found = policy(here)
    assert found.measured == ()
    assert found.remarks[0].startswith("the table of attn tune is left aside")


def test_a_device_that_is_not_here_has_no_table(here: Environment) -> None:
    path = table_path(preset("h200"), here)
    path.parent.mkdir(parents=True)
    write_results(table(), path)
    assert measured_policy(Policy(), preset("h200"), here)(REQUEST) == Policy()


def test_libraries_that_are_installed_have_versions() -> None:
    assert all(isinstance(version, str) for version in known_libraries(cpu()).values())


class TestSelect:
    """Through the command, with a table in ATTN_CACHE_DIR."""

    WORDS = ("select", "--device", "cpu", "--num-heads", "8", "--num-kv-heads", "2")

    @pytest.fixture(autouse=True)
    def written(self, here: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
        write(table(), here)
        monkeypatch.setenv("ATTN_CACHE_DIR", str(here.cache_dir))

    def test_it_decides_and_is_said(self, attn: Any) -> None:
        answer = attn.json(*self.WORDS, "--head-size", "64")
        assert (answer["chosen"], answer["decided_by"]) == ("FLEX_ATTENTION", "measured")
        assert any("measured by attn tune" in note for note in answer["notes"])
        text = attn(*self.WORDS, "--head-size", "64").stdout
        assert "decided by measurement on this device" in text

    def test_it_does_not_decide_what_was_not_measured(self, attn: Any) -> None:
        assert attn.json(*self.WORDS, "--head-size", "128")["decided_by"] == "default"

    def test_it_can_be_left_aside(self, attn: Any) -> None:
        answer = attn.json(*self.WORDS, "--head-size", "64", "--untuned")
        assert answer["decided_by"] == "default"

    def test_a_name_wins(self, attn: Any) -> None:
        answer = attn.json(*self.WORDS, "--head-size", "64", "--backend", "TORCH_SDPA")
        assert (answer["chosen"], answer["decided_by"]) == ("TORCH_SDPA", "user")

    def test_a_whole_model_is_decided_by_it_too(self, attn: Any, tmp_path: Path) -> None:
        config = {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "torch_dtype": "bfloat16",
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        answer = attn.json("select", "--device", "cpu", "--model", str(tmp_path))
        assert answer["backends"] == ["FLEX_ATTENTION"]
