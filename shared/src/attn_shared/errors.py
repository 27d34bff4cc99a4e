"""One exception class per situation.

Every error says what happened, with the value, what is allowed and what to do.
`hint` carries the last part on its own, so that a program can show it apart, and
`exit_code` is what the command line returns for it. Each class also derives from the
built-in exception that code of this field already catches.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from attn_shared.selection import Selection

__all__ = [
    "AttnError",
    "BackendDefinitionError",
    "BackendNotProvidedError",
    "BackendRejectedError",
    "CapabilityComparisonError",
    "DuplicateNameError",
    "InvalidInputError",
    "InvalidRequestError",
    "MLAForwardError",
    "MetadataError",
    "NoBackendError",
    "PlatformMissingError",
    "PluginError",
    "RanksDisagreeError",
    "StorageError",
    "UnknownNameError",
    "UnsupportedOptionError",
    "VendorMissingError",
    "nearest_name",
    "own_words",
]


def own_words(error: BaseException) -> str:
    """Return what an error says, in one line: its type, its message, and those of its causes."""
    message = " ".join(str(error).split())
    words = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if error.__cause__ is None:
        return words
    return f"{words} (caused by {own_words(error.__cause__)})"


def nearest_name(name: object, names: Iterable[str]) -> str | None:
    """Return the one of `names` that is spelled most like `name` in any case, if one is near."""
    folded = {candidate.lower(): candidate for candidate in names}
    near = get_close_matches(str(name).lower(), folded, n=1)
    return folded[near[0]] if near else None


class AttnError(Exception):
    """Base of all errors of attn. `hint` says what to do; "" where the message already does."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        gap = "" if message.endswith("\n") else " "
        super().__init__(f"{message}{gap}Hint: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class InvalidRequestError(AttnError, ValueError):
    """A field of a request or of a layer's description has a value that no backend may accept."""

    exit_code = 2

    @classmethod
    def for_field(
        cls, field: str, value: object, allowed: str, *, hint: str = ""
    ) -> InvalidRequestError:
        """Name the field, its value and what is allowed."""
        return cls(f"{field}={value!r} is not allowed; allowed: {allowed}.", hint=hint)


class InvalidInputError(AttnError, ValueError):
    """A tensor or an argument of a call does not fit; raised before any kernel runs."""

    exit_code = 2

    @classmethod
    def for_argument(
        cls, argument: str, value: object, allowed: str, *, hint: str = ""
    ) -> InvalidInputError:
        """Name the argument, its value and what is allowed."""
        return cls(f"{argument} is {value}; allowed: {allowed}.", hint=hint)


class MetadataError(InvalidInputError):
    """The per-step batch description contradicts itself or the cache."""


class UnsupportedOptionError(AttnError, ValueError):
    """A backend was handed an option that it does not serve; options are never dropped."""

    exit_code = 2


class UnknownNameError(AttnError, ValueError):
    """A name (of a backend, device, preset, dtype, architecture) that nobody registered."""

    exit_code = 2

    @classmethod
    def for_name(
        cls, kind: str, name: object, allowed: Iterable[str], *, hint: str = ""
    ) -> UnknownNameError:
        """Name the kind and value, list what is allowed, and suggest the nearest spelling."""
        names = sorted(allowed)
        near = nearest_name(name, names)
        if near and not hint:
            hint = f"did you mean {near!r}?"
        return cls(f"unknown {kind} {name!r}; allowed: {', '.join(names) or '(none)'}.", hint=hint)


class BackendNotProvidedError(UnknownNameError):
    """A backend name that the field knows and that no installed distribution provides."""

    exit_code = 3


class DuplicateNameError(AttnError, ValueError):
    """Two owners claim one name."""

    exit_code = 2


class PluginError(AttnError, ImportError):
    """A plugin (entry point) failed to load; it disables itself only."""


class BackendDefinitionError(AttnError, TypeError):
    """A backend's class contradicts the interface; raised where it is defined or registered."""


class VendorMissingError(AttnError, ImportError):
    """A vendor library that a backend needs is absent or broken.

    `library` names it, where the backend can tell; `selection` holds every verdict, where the
    backend was named by the user or the model.
    """

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        library: str | None = None,
        selection: Selection | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.library = library
        self.selection = selection


class NoBackendError(AttnError, ValueError):
    """No candidate fits the request on this device; `selection` holds every verdict."""

    exit_code = 3

    def __init__(self, message: str, *, selection: Selection | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.selection = selection


class BackendRejectedError(NoBackendError):
    """The backend that was named cannot serve the request; nothing else is tried."""


class PlatformMissingError(NoBackendError):
    """No installed package serves the devices of this vendor."""


class RanksDisagreeError(AttnError, ValueError):
    """The ranks of a group are about to do different things; raised on each of them."""

    exit_code = 2


class StorageError(AttnError, OSError):
    """A folder or file of the user's cannot be written or read."""

    exit_code = 2


class CapabilityComparisonError(AttnError, TypeError):
    """Capabilities of two vendors were compared; the numbers mean different things."""


class MLAForwardError(AttnError, AttributeError):
    """`forward` was asked of an MLA implementation, which has forward_mha and forward_mqa."""
