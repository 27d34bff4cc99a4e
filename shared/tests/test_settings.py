"""Reading ATTN_* variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_shared.errors import InvalidRequestError
from attn_shared.selection import DecidedBy, Policy
from attn_shared.settings import Settings, from_environ


def test_nothing_set() -> None:
    assert from_environ({"PATH": "/bin"}) == Settings()
    assert Settings().notes() == ()
    assert Settings().policy().named() == (None, DecidedBy.DEFAULT)


@pytest.mark.parametrize("text", ["", "auto", "AUTO", "  "])
def test_auto_is_no_backend(text: str) -> None:
    assert from_environ({"ATTN_BACKEND": text}).backend is None


def test_every_variable() -> None:
    environ = {"ATTN_BACKEND": " TORCH_SDPA ", "ATTN_CACHE_DIR": "/tmp/x", "ATTN_CHECKED": "1"}
    read = from_environ(environ)
    assert read == Settings(backend="TORCH_SDPA", cache_dir=Path("/tmp/x"), checked=True)


def test_an_argument_wins_over_the_environment() -> None:
    settings = Settings(backend="FLEX_ATTENTION")
    by_environment = settings.policy()
    assert by_environment.backend == "FLEX_ATTENTION"
    assert by_environment.source == "environment variable ATTN_BACKEND"
    assert settings.policy("TORCH_SDPA") == Policy(backend="TORCH_SDPA")
    assert settings.policy("auto") == Policy()


def test_what_was_read_is_told() -> None:
    notes = from_environ({"ATTN_BACKEND": "X", "ATTN_BAKEND": "Y"}).notes()
    assert notes[0] == "ATTN_BACKEND=X is set"
    assert notes[1].startswith("ATTN_BAKEND is set and unknown; known: ATTN_BACKEND, ")


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("Off", False), ("0", False)])
def test_flags(text: str, value: bool) -> None:
    assert from_environ({"ATTN_CHECKED": text}).checked is value


def test_a_flag_that_is_neither() -> None:
    with pytest.raises(InvalidRequestError, match=r"ATTN_CHECKED='maybe' .*1 or 0"):
        from_environ({"ATTN_CHECKED": "maybe"})
