from __future__ import annotations

from typing import Any

import pytest

from attn_shared.known_backends import KNOWN_BACKENDS, KNOWN_MAMBA_BACKENDS
from attn_shared.registry import DEFAULT_REGISTRY

REQUEST = ("--device", "h200", "--num-heads", "8", "--head-size", "64")


@pytest.mark.parametrize("name", [*KNOWN_BACKENDS, *KNOWN_MAMBA_BACKENDS])
def test_every_known_name_is_explained(attn: Any, name: str) -> None:
    answer = attn.json("explain", name)
    (row,) = answer["backends"]
    assert row["name"] == name
    assert row["description"]
    provided = {*DEFAULT_REGISTRY.names(), *DEFAULT_REGISTRY.names("mamba")}
    assert row["status"] == ("provided" if name in provided else "known, not provided")
    assert (row["plan"] is None) == (name in provided)


def test_one_that_is_not_provided_has_its_published_limits(attn: Any) -> None:
    (row,) = attn.json("explain", "HPC_ATTN", "--device", "h100")["backends"]
    assert row["limits_of"].startswith("vLLM 0.25.1 on NVIDIA H100")
    assert row["limits"]["head_sizes"] == "128"
    assert row["elsewhere"] == {"vllm": ["HPC_ATTN"]}


def test_one_that_is_provided_has_its_own(attn: Any) -> None:
    answer = attn.json("explain", "torch_sdpa", "--device", "h200")
    (row,) = answer["backends"]
    assert row["limits_of"].startswith("attn-torch ")
    assert answer["device"]["name"] == "NVIDIA H200"
    text = attn("explain", "TORCH_SDPA").stdout
    assert "vllm: TORCH_SDPA; sglang: torch_native; transformers: sdpa" in text


def test_blocks_are_told_with_the_largest(attn: Any) -> None:
    text = attn("explain", "ROCM_AITER_FA", "--device", "mi300x").stdout
    assert "multiple of 16, at most 32" in text
    text = attn("explain", "FLASHINFER_TRTLLM", "--device", "h200").stdout
    assert "16, 32, 64, 128" in text
    assert "multiple of" not in text
    text = attn("explain", "FLASHINFER", "--device", "h100").stdout
    assert "multiple of 16" in text
    assert "at most" not in text


def test_without_a_device_limits_are_of_one_that_it_runs_on(attn: Any) -> None:
    (row,) = attn.json("explain", "TOKENSPEED_MLA")["backends"]
    assert row["limits_of"] == "vLLM 0.25.1 on NVIDIA B200"


def test_a_name_elsewhere_is_told_apart(attn: Any) -> None:
    answer = attn.json("explain", "--from", "vllm:FLASHINFER")
    assert answer["from"]["name"] == "FLASHINFER"
    assert [row["name"] for row in answer["backends"]] == ["FLASHINFER", "FLASHINFER_TRTLLM"]
    text = attn("explain", "--from", "sglang:fa3").stdout
    assert text.startswith("sglang:fa3 is FLASH_ATTN, FLASH_ATTN_MLA\nwith FlashAttention 3\n")
    text = attn("explain", "--from", "sglang:wave").stdout
    assert text.startswith("sglang:wave is nothing that attn has\n")
    assert attn("explain", "--from", "sglang:fa4", "-q").stdout == "FLASH_ATTN\n"


def test_a_name_elsewhere_is_used_for_a_request(attn: Any) -> None:
    answer = attn.json("select", *REQUEST, "--from", "transformers:sdpa")
    assert (answer["chosen"], answer["decided_by"]) == ("TORCH_SDPA", "user")
    assert any("option --from transformers:sdpa" in note for note in answer["notes"])


def test_a_request_beside_a_name_gets_both_answers(attn: Any) -> None:
    answer = attn.json("explain", "TORCH_SDPA", *REQUEST)
    assert answer["about"][0]["name"] == "TORCH_SDPA"
    assert answer["decided_by"] == "default"
    text = attn("explain", "TORCH_SDPA", *REQUEST).stdout
    assert text.index("attn-torch") < text.index("Asked: 8 query heads")


def test_a_capability_that_raises_is_quoted_in_the_place_of_limits(
    attn: Any, paged16: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DEFAULT_REGISTRY.load(paged16), "capability", lambda *_: 1 // 0)
    (row,) = attn.json("explain", paged16, "--device", "h200")["backends"]
    assert (row["status"], row["limits"]) == ("provided", None)
    words = "its capability raised ZeroDivisionError: integer division or modulo by zero"
    assert row["limits_error"] == f"{words} on NVIDIA H200"
    assert words in " ".join(attn("explain", paged16, "--device", "h200").stdout.split())


def test_a_third_partys_backend_has_no_name_elsewhere(attn: Any, paged16: str) -> None:
    (row,) = attn.json("explain", paged16)["backends"]
    assert (row["elsewhere"], row["plan"]) == ({}, None)
    assert row["limits"]["head_sizes"] == "64, 128"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("explain", "TORCH_SPDA"), "unknown backend 'TORCH_SPDA'; allowed: CPU_ATTN"),
        (("explain", "--from", "FLASHINFER"), "from is 'FLASHINFER'; allowed: ORIGIN:NAME"),
        (("explain", "--from", "vllm:X"), "unknown vllm backend 'X'"),
        (("explain", "TORCH_SDPA", "--from", "vllm:X"), "together with --from"),
        (("explain", "TORCH_SDPA", "--diff", "h100", "b200"), "together with --diff"),
        (("explain", "TORCH_SDPA", "--model", "x"), "together with --model"),
        (("explain", "--diff", "h100", "b200", "--device", "t4"), "together with --diff"),
        (("select", "--num-heads", "8", "--max-model-len", "9"), "with --model"),
        (("explain",), "--num-heads is missing"),
        (
            ("explain", "TORCH_SDPA", "--head-size", "64", "--kv-cache-dtype", "fp8"),
            "--head-size, --kv-cache-dtype is given without a request; allowed: with --num-heads",
        ),
        (("explain", "--from", "vllm:FLASHINFER", "--sinks"), "--sinks is given without a request"),
        (("explain", "TORCH_SDPA", "--backend", "TORCH_SDPA"), "--backend is given without"),
    ],
)
def test_bad_input(attn: Any, words: tuple[str, ...], message: str) -> None:
    assert message in attn.json(*words, code=2)["error"]["message"]
