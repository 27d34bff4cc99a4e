"""Level Zero's loader."""

from __future__ import annotations

import pytest

from attn_xpu._vendor import level_zero


def test_a_missing_loader_is_told_with_the_loaders_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_zero, "_LIBRARY_NAME", "libno-such-loader.so.1")
    problem = level_zero.loader_problem()
    assert problem is not None
    assert "libno-such-loader.so.1" in problem
    assert "install Intel's GPU runtime" in problem


def test_a_loader_that_opens_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_zero, "_LIBRARY_NAME", None)  # the process itself
    assert level_zero.loader_problem() is None
