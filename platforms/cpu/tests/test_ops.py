from __future__ import annotations

from collections.abc import Callable

import pytest

from attn_cpu._ops import call
from attn_shared.errors import InvalidInputError


def _raiser(words: str) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise RuntimeError(words)

    return fail


def test_a_refusal_becomes_the_projects_error() -> None:
    with pytest.raises(InvalidInputError, match=r"^scale is inf; allowed: finite$"):
        call(_raiser("attn_cpu: scale is inf; allowed: finite\nException raised from somewhere"))


def test_what_is_no_refusal_is_left_alone() -> None:
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        call(_raiser("out of memory"))
    assert not isinstance(caught.value, InvalidInputError)


def test_arguments_go_through() -> None:
    seen: list[object] = []
    call(lambda *arguments: seen.extend(arguments), 1, None, "a")
    assert seen == [1, None, "a"]
