"""The backends of attn-torch keep the contract, in quick depth, where they are installed."""

from __future__ import annotations

import importlib.util

import pytest

from attn_conformance.verify import verify

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("attn_torch") is None, reason="attn-torch is not installed"
)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLEX_ATTENTION", "TORCH_MLA"])
def test_keeps_the_contract(backend: str) -> None:
    report = verify(backend)
    assert [f"{item.name}: {item.message}" for item in report.failures] == []
    assert report.problems == ()


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLEX_ATTENTION", "TORCH_MLA"])
def test_keeps_the_contract_on_a_gpu(backend: str) -> None:
    report = verify(backend, device="cuda:0")
    assert [f"{item.name}: {item.message}" for item in report.failures] == []
    assert report.problems == ()
