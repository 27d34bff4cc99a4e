from __future__ import annotations

from attn_cli.completion import complete_backend, complete_device


def test_presets_are_completed_in_any_case() -> None:
    assert complete_device("H") == ["h100", "h200"]
    assert complete_device("zz") == []


def test_backends_are_completed_with_auto() -> None:
    assert complete_backend("a") == ["auto"]
    assert "TORCH_SDPA" in complete_backend("torch")
    assert complete_backend("")[0] == "auto"
