"""Names under which transformers finds attn, and what decides the backend."""

from __future__ import annotations

import pytest
import torch
from hf_testing import paged, tiny, token_ids
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

import attn_transformers
from attn_shared.arch import Vendor
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidRequestError, NoBackendError, UnknownNameError
from attn_shared.request import AttentionRequest
from attn_shared.selection import DecidedBy, Policy, Selection
from attn_shared.selector import DEFAULT_SELECTOR
from attn_transformers.masks import attention_mask


def selection_of(implementation: str) -> Selection:
    model, cache = tiny("llama"), paged()
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        model(token_ids(1, 3), cache=cache)
    return cache.selections()[0]


def test_names() -> None:
    names = attn_transformers.register()
    assert names[0] == "attn"
    assert {"attn:TORCH_SDPA", "attn:FLEX_ATTENTION"} <= set(names)


def test_every_name_has_a_mask_function() -> None:
    for name in attn_transformers.register():
        assert callable(AttentionInterface._global_mapping[name])
        assert AttentionMaskInterface._global_mapping[name] is attention_mask


@pytest.mark.parametrize(
    ("backend", "expected"), [(None, "attn"), ("auto", "attn"), ("TORCH_SDPA", "attn:TORCH_SDPA")]
)
def test_the_name_of_a_backend(backend: str | None, expected: str) -> None:
    assert attn_transformers.implementation_name(backend) == expected


@pytest.mark.parametrize("name", ["attn", "attn:TORCH_SDPA", "attn:FLEX_ATTENTION"])
def test_transformers_takes_the_name_when_a_model_is_made(name: str) -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=name)
    assert model.config._attn_implementation == name


def test_attn_lets_the_selector_choose() -> None:
    assert selection_of("attn").decided_by is DecidedBy.DEFAULT


def test_a_name_in_the_implementation_is_binding() -> None:
    found = selection_of("attn:FLEX_ATTENTION")
    assert (found.chosen, found.decided_by) == ("FLEX_ATTENTION", DecidedBy.USER)
    assert found.policy.source == "attn_implementation attn:FLEX_ATTENTION"


def test_a_backend_named_in_register_is_what_attn_means() -> None:
    attn_transformers.register("FLEX_ATTENTION")
    assert selection_of("attn").chosen == "FLEX_ATTENTION"
    assert selection_of("attn:TORCH_SDPA").chosen == "TORCH_SDPA"


def test_the_environment_is_honoured_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND", "FLEX_ATTENTION")
    attn_transformers.register()
    found = selection_of("attn")
    assert found.chosen == "FLEX_ATTENTION"
    assert any("ATTN_BACKEND" in note for note in found.notes())
    attn_transformers.register("auto")
    assert selection_of("attn").decided_by is DecidedBy.DEFAULT


def test_a_backend_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match=r"'TORCH_SPDA'.*did you mean 'TORCH_SDPA'"):
        attn_transformers.register("TORCH_SPDA")
    monkeypatch.setenv("ATTN_BACKEND", "NO_SUCH")
    with pytest.raises(UnknownNameError, match="NO_SUCH"):
        attn_transformers.register()


def test_a_setting_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_CHECKED", "perhaps")
    with pytest.raises(InvalidRequestError, match="ATTN_CHECKED"):
        attn_transformers.register()


def test_checked_batches_run_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_CHECKED", "1")
    attn_transformers.register()
    assert selection_of("attn").chosen is not None


def test_the_hosts_backend_is_loaded_before_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    asked: list[tuple[str, str | None]] = []

    def resolve(request: AttentionRequest, device: DeviceFacts, policy: Policy) -> None:
        asked.append((device.vendor.value, policy.backend))
        raise NoBackendError("nothing serves this")  # is the layer's to raise, not register's

    monkeypatch.setattr(DEFAULT_SELECTOR, "resolve", resolve)
    attn_transformers.register("TORCH_SDPA")
    assert asked == [(Vendor.CPU.value, "TORCH_SDPA")]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    attn_transformers.register()
    assert len(asked) == 1
