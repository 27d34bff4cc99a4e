"""FlashInfer's sampling kernels, found by what they take; they are compiled at first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from attn_cuda._vendor.flashinfer_library import library
from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import installed_version, optional_arguments, require

__all__ = ["SPEC", "Kernels", "probe"]

SPEC = VendorSpec(
    name="flashinfer_sampling",
    distributions=("flashinfer-python",),
    module="flashinfer",
    install="pip install flashinfer-python",
    probe="attn_cuda._vendor.flashinfer_sampling:probe",
)

_TOO_OLD = "too old; pip install -U flashinfer-python"
_DRAWS = ("sampling_from_probs", "top_p_sampling_from_probs", "min_p_sampling_from_probs")
_ARGUMENTS = ("deterministic", "generator", "return_valid")


class Kernels:
    """The calls of `flashinfer.sampling` that are used, resolved once.

    Of the library's top-k those that mask are used, which keep ties at the cut; its joint call
    cuts them in later releases where k is one number (read in 0.6.18 and 0.7.4).

    Attributes:
        mask_top_k: (logits, k) -> logits with -inf outside the k largest and their ties.
        draw, draw_top_p, draw_min_p: probabilities to ids.
        returns_valid: whether a draw can say for which rows it was one.
    """

    def __init__(self) -> None:
        """Import the library and take its calls.

        Raises:
            ImportError: with the library's own words, or naming what is missing.
        """
        library()
        module = importlib.import_module("flashinfer.sampling")
        calls = {name: require(module, name, _TOO_OLD) for name in _DRAWS}
        found = optional_arguments(calls, _ARGUMENTS)
        for name in _DRAWS:
            if f"{name}.generator" not in found or f"{name}.deterministic" not in found:
                raise ImportError(
                    f"flashinfer.sampling.{name} takes no generator or no deterministic: {_TOO_OLD}"
                )
        self.mask_top_k: Callable[..., Any] = require(module, "top_k_mask_logits", _TOO_OLD)
        self.draw, self.draw_top_p, self.draw_min_p = (calls[name] for name in _DRAWS)
        self.returns_valid = all(f"{name}.return_valid" in found for name in _DRAWS)
        self.optional_arguments = found
        self._build: Callable[[], object] | None = getattr(module, "get_sampling_module", None)

    def build(self) -> None:
        """Compile the kernels, or find them compiled; whatever that raises passes through.

        It takes a minute or more the first time. A release that hides it compiles in the first
        call.
        """
        if self._build is not None:
            self._build()


def probe() -> VendorBuild:
    """Import the library and say what its sampling calls take.

    Raises:
        ImportError: with the library's own words, or naming what is missing.
    """
    kernels = Kernels()
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        optional_arguments=kernels.optional_arguments,
    )
