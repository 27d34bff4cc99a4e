from __future__ import annotations

import pickle

import pytest

from attn_shared import errors
from attn_shared.errors import (
    AttnError,
    BackendNotProvidedError,
    InvalidInputError,
    InvalidRequestError,
    NoBackendError,
    UnknownNameError,
    VendorMissingError,
    nearest_name,
    own_words,
)

CLASSES = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, AttnError)
]


@pytest.mark.parametrize(
    ("name", "builtin", "exit_code"),
    [
        ("BackendDefinitionError", TypeError, 1),
        ("BackendNotProvidedError", ValueError, 3),
        ("BackendRejectedError", ValueError, 3),
        ("CapabilityComparisonError", TypeError, 1),
        ("DuplicateNameError", ValueError, 2),
        ("InvalidInputError", ValueError, 2),
        ("InvalidRequestError", ValueError, 2),
        ("MLAForwardError", AttributeError, 1),
        ("MetadataError", ValueError, 2),
        ("NoBackendError", ValueError, 3),
        ("PlatformMissingError", ValueError, 3),
        ("PluginError", ImportError, 1),
        ("UnknownNameError", ValueError, 2),
        ("UnsupportedOptionError", ValueError, 2),
        ("VendorMissingError", ImportError, 4),
    ],
)
def test_each_class_is_the_builtin_that_callers_catch(
    name: str, builtin: type[Exception], exit_code: int
) -> None:
    found = getattr(errors, name)
    assert issubclass(found, AttnError)
    assert issubclass(found, builtin)
    assert found.exit_code == exit_code


def test_every_class_is_public() -> None:
    assert {found.__name__ for found in CLASSES} <= set(errors.__all__)


def test_a_hint_is_in_the_text_and_apart() -> None:
    error = AttnError("The box is full.", hint="empty it.")
    assert str(error) == "The box is full. Hint: empty it."
    assert error.message == "The box is full."
    assert error.hint == "empty it."
    assert str(AttnError("The box is full.")) == "The box is full."
    assert str(AttnError("A table:\na  b\n", hint="read it.")) == "A table:\na  b\nHint: read it."


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_cross_processes(kind: type[AttnError]) -> None:
    error = pickle.loads(pickle.dumps(kind("It broke.", hint="mend it.")))
    assert type(error) is kind
    assert str(error) == "It broke. Hint: mend it."
    assert error.message == "It broke."
    assert error.hint == "mend it."


def test_a_field_error_names_field_value_and_what_is_allowed() -> None:
    error = InvalidRequestError.for_field("head_size", -1, "an int >= 1")
    assert str(error) == "head_size=-1 is not allowed; allowed: an int >= 1."


def test_an_argument_error_names_argument_value_and_what_is_allowed() -> None:
    error = InvalidInputError.for_argument("key shape", (3, 2), "(T, 4, 64)", hint="transpose it.")
    assert str(error) == "key shape is (3, 2); allowed: (T, 4, 64). Hint: transpose it."


def test_an_unknown_name_lists_valid_ones_and_suggests_the_nearest() -> None:
    error = UnknownNameError.for_name("backend", "flash_atn", ["TRITON_ATTN", "FLASH_ATTN"])
    assert str(error) == (
        "unknown backend 'flash_atn'; allowed: FLASH_ATTN, TRITON_ATTN. "
        "Hint: did you mean 'FLASH_ATTN'?"
    )


def test_an_unknown_name_far_from_all_gets_no_suggestion() -> None:
    error = UnknownNameError.for_name("backend", "zebra", ["FLASH_ATTN"])
    assert str(error) == "unknown backend 'zebra'; allowed: FLASH_ATTN."


def test_an_unknown_name_among_none_says_so() -> None:
    assert str(UnknownNameError.for_name("backend", "X", [])) == (
        "unknown backend 'X'; allowed: (none)."
    )


def test_a_callers_hint_wins_over_the_suggestion() -> None:
    error = UnknownNameError.for_name("device", "h10", ["h100"], hint="see `attn info`.")
    assert error.hint == "see `attn info`."


def test_for_name_builds_the_subclass() -> None:
    assert type(BackendNotProvidedError.for_name("x", "y", [])) is BackendNotProvidedError


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("h20", "h200"), ("H200", "h200"), ("hopper", None), (3, None), ("", None)],
)
def test_nearest_name_ignores_case(name: object, nearest: str | None) -> None:
    assert nearest_name(name, ["h200", "mi300x"]) == nearest


def test_own_words_are_one_line_with_type_and_causes() -> None:
    try:
        try:
            raise OSError("libfoo.so:\n   cannot open")
        except OSError as cause:
            raise ImportError("foo is broken") from cause
    except ImportError as error:
        words = own_words(error)
    assert words == "ImportError: foo is broken (caused by OSError: libfoo.so: cannot open)"


def test_own_words_of_an_error_without_a_message_are_its_type() -> None:
    assert own_words(ImportError()) == "ImportError"


def test_refusals_carry_what_a_program_needs() -> None:
    assert NoBackendError("None.").selection is None
    assert VendorMissingError("Gone.", library="flash_attn").library == "flash_attn"
    assert VendorMissingError("Gone.").library is None
