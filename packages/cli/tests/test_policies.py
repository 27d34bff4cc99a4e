from __future__ import annotations

from typing import Any

import pytest

from attn_cli.policies import foreign_name_of, resolver
from attn_cli.request_flags import RequestFlags
from attn_shared.device import preset
from attn_shared.errors import InvalidInputError, NoBackendError, UnknownNameError
from attn_shared.selection import DecidedBy, Selection
from attn_shared.settings import Settings

HERE = Settings()
H200 = preset("h200")


def answer(settings: Settings = HERE, **flags: Any) -> Selection:
    asked = RequestFlags(**{"num_heads": 8, "head_size": 64, **flags})
    return resolver(asked, settings, H200)(asked.to_request())


def test_an_option_names_the_backend() -> None:
    found = answer(backend="FLEX_ATTENTION")
    assert (found.chosen, found.decided_by) == ("FLEX_ATTENTION", DecidedBy.USER)
    assert found.policy.source == "option --backend"


def test_the_environment_names_it_where_no_option_does() -> None:
    settings = Settings(backend="FLEX_ATTENTION")
    assert answer(settings).chosen == "FLEX_ATTENTION"
    assert answer(settings, backend="TORCH_SDPA").chosen == "TORCH_SDPA"


def test_a_name_elsewhere_names_it() -> None:
    found = answer(from_name="transformers:sdpa")
    assert (found.chosen, found.decided_by) == ("TORCH_SDPA", DecidedBy.USER)
    assert found.policy.source == "option --from transformers:sdpa"


def test_it_wins_over_the_environment() -> None:
    found = answer(Settings(backend="FLEX_ATTENTION"), from_name="sglang:torch_native")
    assert found.chosen == "TORCH_SDPA"


def test_it_may_ask_for_a_generation_of_flash_attention() -> None:
    found = answer(from_name="transformers:flash_attention_3")
    assert (found.chosen, found.request.flash_attn_version) == ("FLASH_ATTN", 3)


def test_without_a_device_it_is_this_machines() -> None:
    asked = RequestFlags(num_heads=8, head_size=64, from_name="transformers:sdpa")
    found = resolver(asked, HERE, None)(asked.to_request())
    assert (found.chosen, found.device.is_simulated) == ("TORCH_SDPA", False)


def test_no_name_elsewhere_is_none() -> None:
    assert foreign_name_of(RequestFlags()) is None


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ({"from_name": "x:y"}, InvalidInputError, "ORIGIN:NAME"),
        ({"from_name": "vllm:NOPE"}, UnknownNameError, "unknown vllm backend 'NOPE'"),
        (
            {"from_name": "vllm:FLASHINFER", "backend": "auto"},
            InvalidInputError,
            "--from is given together with --backend",
        ),
        ({"from_name": "sglang:flashmla"}, NoBackendError, "none is for mha on nvidia"),
        ({"from_name": "transformers:eager"}, NoBackendError, "nothing that attn has"),
    ],
)
def test_names_that_mean_nothing_here(flags: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        answer(**flags)


def test_libraries_are_preferred_and_avoided_by_options() -> None:
    found = answer(prefer="triton, flash_attn", avoid="flashinfer")
    assert found.policy.prefer == ("triton", "flash_attn")
    assert found.policy.avoid == ("flashinfer",)
    named = answer(from_name="transformers:sdpa", avoid="triton")
    assert (named.chosen, named.policy.avoid) == ("TORCH_SDPA", ("triton",))


def test_a_library_in_both_options_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="libraries that are not avoided"):
        answer(prefer="triton", avoid="triton")


@pytest.mark.parametrize("text", ["", " ", ",", "triton,", "triton,,flashinfer"])
@pytest.mark.parametrize("option", ["prefer", "avoid"])
def test_an_empty_name_of_a_library_is_refused(option: str, text: str) -> None:
    with pytest.raises(InvalidInputError, match=f"--{option} is '{text}'; allowed: names of"):
        answer(**{option: text})
