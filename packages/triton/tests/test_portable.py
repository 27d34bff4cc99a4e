"""Who writes the cache and merges: decided once, by the device and by what is installed."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest

from attn_shared.device import preset
from attn_shared.kv_write import write_kv
from attn_shared.merge import merge_attn_states
from attn_shared.page_lists import page_indices
from attn_triton.portable import portable_for

H200 = preset("h200")
HERE = replace(H200, is_simulated=False)


def test_torch_where_the_device_is_not_here() -> None:
    found = portable_for(H200)
    assert (found.name, found.write_kv, found.merge) == ("torch", write_kv, merge_attn_states)
    assert found.page_indices is page_indices


def test_torch_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert portable_for(HERE).name == "torch"


def test_triton_where_both_are(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("write_kv", "merge_attn_states", "page_indices")
    kernels = SimpleNamespace(**{name: object() for name in names})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: kernels)
    found = portable_for(HERE)
    assert found.name == "triton"
    assert (found.write_kv, found.merge) == (kernels.write_kv, kernels.merge_attn_states)
    assert found.page_indices is kernels.page_indices
