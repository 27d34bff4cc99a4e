from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

REQUEST = ("--num-heads", "8", "--head-size", "64", "--kv-cache-dtype", "fp8")


@pytest.fixture
def only_on_nvidia(paged16: str) -> str:
    """The third party's backend: for NVIDIA and CPU, blocks of 16, head sizes 64 and 128."""
    return paged16


def test_both_answers_and_what_differs(attn: Any, only_on_nvidia: str) -> None:
    plain = REQUEST[:4]
    answer = attn.json("explain", "--diff", "h100", "mi300x", *plain)
    assert [d["asked"] for d in answer["devices"]] == ["h100", "mi300x"]
    (group,) = answer["groups"]
    assert len(group["chosen"]) == 2
    assert only_on_nvidia in group["differences"]
    row = next(r for r in group["backends"] if r["name"] == only_on_nvidia)
    first, second = row["verdicts"]
    assert (first["status"], second["status"]) == ("eligible", "rejected")
    assert second["reasons"][0]["code"] == "device"


def test_what_is_the_same_is_not_shown(attn: Any) -> None:
    answer = attn.json("explain", "--diff", "h100", "h200", *REQUEST)
    (group,) = answer["groups"]
    assert (group["is_same"], group["differences"]) == (True, [])
    text = attn("explain", "--diff", "h100", "h200", *REQUEST).stdout
    assert "every candidate has the same verdict on both" in text


def test_another_kernel_of_the_same_backend_differs(attn: Any) -> None:
    plain = (*REQUEST[:4], "--backend", "FLASH_ATTN")
    (group,) = attn.json("explain", "--diff", "a100", "h100", *plain)["groups"]
    assert group["is_same"]
    assert "FLASH_ATTN" in group["differences"]
    text = attn("explain", "--diff", "a100", "h100", *plain).stdout
    assert "FlashAttention 2" in text
    assert "FlashAttention 3" in text


def test_a_table_with_a_column_for_each(attn: Any, only_on_nvidia: str) -> None:
    text = attn("explain", "--diff", "h100", "b60", *REQUEST[:4]).stdout
    lines = text.splitlines()
    assert lines[0].endswith("on h100 (sm_90), block size 16")
    assert "on b60 (bmg)" in lines[1]
    assert "Differs" in text
    assert only_on_nvidia in text


def test_a_device_on_which_nothing_fits_is_an_answer(attn: Any) -> None:
    answer = attn.json("explain", "--diff", "h100", "b200", *REQUEST[:4], "--kv-layout", "HND",
                       "--kv-cache-dtype", "turboquant_k8v4")  # fmt: skip
    assert answer["groups"][0]["chosen"] == [None, None]


def test_a_model_is_compared_group_by_group(attn: Any, tmp_path: Path) -> None:
    config = {
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "head_dim": 64,
        "sliding_window": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = attn.json("explain", "--diff", "t4", "h100", "--model", str(tmp_path))
    assert [group["name"] for group in answer["groups"]] == ["window of 64", "full attention"]
    quiet = attn("explain", "--diff", "t4", "h100", "--model", str(tmp_path), "-q").stdout
    assert quiet.startswith("window of 64: ")
    assert (
        "\nwindow of 64\n"
        in attn("explain", "--diff", "t4", "h100", "--model", str(tmp_path)).stdout
    )


@pytest.mark.parametrize(
    ("devices", "message"),
    [(("h100", "h1000"), "unknown device 'h1000'"), (("cpu:9", "h100"), "device index is 9")],
)
def test_a_device_that_nobody_knows(attn: Any, devices: tuple[str, str], message: str) -> None:
    answer = attn.json("explain", "--diff", *devices, *REQUEST, code=2)
    assert message in answer["error"]["message"]
