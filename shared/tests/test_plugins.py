from __future__ import annotations

from typing import Any

import pytest
from attn_shared_fakes import FakeBackend, FakeEntryPoint, backend

from attn_shared._plugins import (
    API_VERSION,
    LoadFailure,
    Registration,
    api_problem,
    backend_problem,
    distribution_of,
    import_path,
    normalized_path,
    path_of,
)
from attn_shared.backend import AttentionBackend
from attn_shared.errors import InvalidInputError


def test_a_source_is_a_distribution_with_its_version() -> None:
    installed = Registration(name="X", path="a:X", distribution="attn-x", version="1.2")
    assert installed.source == "attn-x 1.2"
    assert Registration(name="X", path="a:X", distribution="here").source == "here"


@pytest.mark.parametrize(
    ("version", "text"),
    [("1.2", "X = a:X (attn-x 1.2): OSError: no"), ("", "X = a:X (attn-x): OSError: no")],
)
def test_a_failure_is_one_line(version: str, text: str) -> None:
    failure = LoadFailure(
        entry_point="X = a:X", distribution="attn-x", version=version, error="OSError: no"
    )
    assert str(failure) == text


def test_an_entry_point_may_have_no_distribution() -> None:
    known: Any = FakeEntryPoint("X", "a:X", "attn-x", "1.2")
    assert distribution_of(known) == ("attn-x", "1.2")
    unknown: Any = FakeEntryPoint("X", "a:X", "")
    assert distribution_of(unknown) == ("unknown distribution", "")


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("pkg.mod:Class", "pkg.mod:Class"),
        ("pkg.mod.Class", "pkg.mod:Class"),
        ("mod:Outer.Inner", "mod:Outer.Inner"),
    ],
)
def test_both_forms_of_a_path_mean_one(path: str, normal: str) -> None:
    assert normalized_path(path) == path_of(path) == normal


@pytest.mark.parametrize("path", ["", "Class", "pkg.mod:", ":Class", "pkg mod.Class", "a:b:c"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidInputError, match=r"path of a backend is '.*'; .*package\.module:Cl"):
        normalized_path(path)


def test_a_class_has_the_path_that_imports_it() -> None:
    assert path_of(FakeBackend) == "attn_shared_fakes:FakeBackend"
    assert import_path("attn_shared_fakes:FakeBackend") is FakeBackend
    assert import_path("json:JSONDecoder.decode").__name__ == "decode"


class Half(AttentionBackend):
    name = "HALF"
    attn_api = ">=1,<2"


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (backend("X"), None),
        (backend("X", auto_priority=150), None),
        (backend("X", vendor_libraries=("flash_attn",)), None),
        (dict, "<class 'dict'> is not a subclass of attn_shared.backend.AttentionBackend"),
        (None, "None is not a subclass of attn_shared.backend.AttentionBackend"),
        (Half, "Half does not define capability, get_builder_cls, get_impl_cls"),
        (backend("Y"), "Y.name is 'Y', and it is registered as 'X'"),
        (FakeBackend, "FakeBackend.name is None, and it is registered as 'X'"),
        (backend("X", auto_priority="high"), "X.auto_priority is 'high', not an int or None"),
        (backend("X", auto_priority=True), "X.auto_priority is True, not an int or None"),
        (
            type("X", (FakeBackend,), {"name": "X", "vendor_libraries": ("flash_attn",)}),
            "X names vendor_libraries and does not define load_vendor",
        ),
        (
            backend("X", attn_api=">=2,<3"),
            "it needs attn_api >=2,<3, and this attn-shared has 1",
        ),
    ],
)
def test_what_keeps_a_class_from_serving(cls: object, problem: str | None) -> None:
    assert backend_problem(cls, "X") == problem


@pytest.mark.parametrize("declared", [">=1,<2", ">=1", "==1", " >=1 , <= 1", "<2", ">0"])
def test_ranges_that_admit_this_interface(declared: str) -> None:
    assert API_VERSION == 1
    assert api_problem(declared) is None


@pytest.mark.parametrize("declared", [">=2", "<1", "==2", ">=1,<1", ">1"])
def test_ranges_that_do_not_are_named(declared: str) -> None:
    assert api_problem(declared) == f"it needs attn_api {declared}, and this attn-shared has 1"


@pytest.mark.parametrize("declared", ["1", "~=1", ">=", ">=1;<2", ">=1.0", "=>1", 1, "*"])
def test_what_is_no_range_is_named(declared: object) -> None:
    assert api_problem(declared) == (
        f'attn_api={declared!r} is not a list of bounds such as ">=1,<2"'
    )


@pytest.mark.parametrize("declared", ["", None])
def test_a_class_must_declare_its_range(declared: object) -> None:
    assert api_problem(declared) == 'it declares no attn_api; write attn_api = ">=1,<2"'
