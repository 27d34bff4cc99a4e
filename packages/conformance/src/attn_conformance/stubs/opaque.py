"""Functions whose result only the vendor's own kernels read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature

__all__ = ["OpaqueFunction"]


@dataclass(frozen=True, kw_only=True)
class OpaqueFunction:
    """A function that answers with something that nobody else looks into.

    Attributes:
        signature: its parameters.
        answer: makes the result from the arguments.
    """

    signature: VendorSignature
    answer: Callable[[Mapping[str, Any]], Any]

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for the function; its calls go to the recorder."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.answer(recorder.record(self.signature, arguments, keywords))

        call.__name__ = call.__qualname__ = self.signature.name
        call.__signature__ = self.signature.signature  # type: ignore[attr-defined]
        return call
