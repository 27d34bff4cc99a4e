"""Which build of the library this process has: a layer is built without being told its device."""

from __future__ import annotations

from attn_shared.errors import VendorMissingError, own_words
from attn_xpu._ipex_capability import LIBRARY, NAME, Build, build_named
from attn_xpu._vendor import ipex

__all__ = ["loaded_build"]


def loaded_build() -> Build:
    """Return the build, importing the library.

    Raises:
        VendorMissingError: it does not load, in its own words.
    """
    try:
        return build_named(ipex.label())
    except ImportError as error:
        raise VendorMissingError(
            f"{NAME} cannot load {LIBRARY}: {own_words(error)}.",
            library=LIBRARY,
            hint=ipex.SPEC.install,
        ) from error
