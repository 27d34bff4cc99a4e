"""What a vendor's stub was called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_conformance.stubs.signature import VendorSignature

__all__ = ["Recorder", "VendorCall"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VendorCall:
    """One call.

    Attributes:
        function: its name in the signature.
        arguments: parameter -> value, defaults included.
        given: parameters that the caller named or placed.
        positional: those of them that it placed.
    """

    function: str
    arguments: Mapping[str, Any]
    given: frozenset[str]
    positional: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Recorder:
    """Collects calls in their order.

    Attributes:
        calls: all of them.
    """

    calls: list[VendorCall] = field(default_factory=list)

    def of(self, function: str) -> list[VendorCall]:
        """Return the calls of one function."""
        return [call for call in self.calls if call.function == function]

    def record(
        self, signature: VendorSignature, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Keep a call, and return its arguments with defaults.

        Raises:
            TypeError: it does not fit the signature.
        """
        bound = signature.bind(arguments, keywords)
        given = frozenset(bound.arguments)
        bound.apply_defaults()
        names = list(signature.signature.parameters)
        call = VendorCall(
            function=signature.name,
            arguments=dict(bound.arguments),
            given=given,
            positional=tuple(names[: len(arguments)]),
        )
        self.calls.append(call)
        return dict(bound.arguments)
