"""Which releases of vLLM the adapters are written for, and by which of its two interfaces."""

from __future__ import annotations

from enum import StrEnum

from packaging.version import InvalidVersion, Version

from attn_shared.errors import UnsupportedOptionError

__all__ = ["DECLARED", "Interface", "interface_of"]


class Interface(StrEnum):
    """What a backend tells vLLM of its cache."""

    SHAPES = "shapes"
    """It names the tensor's shape and stride order (0.25.1)."""
    LAYOUTS = "layouts"
    """It names the layouts that it can read, and vLLM hands it [blocks, heads, tokens, content] or
    [blocks, tokens, heads, content] (0.32 and 0.33)."""


_RANGES = (
    (Version("0.25.1"), Version("0.26"), Interface.SHAPES),
    (Version("0.32"), Version("0.34"), Interface.LAYOUTS),
)

DECLARED = " or ".join(f">={first},<{end}" for first, end, _ in _RANGES)
"""The releases, as requirements."""


def interface_of(version: str) -> Interface:
    """Return the interface of a release.

    Args:
        version: vLLM's own version, which may have a local part ("0.32.0+cpu").

    Raises:
        UnsupportedOptionError: the adapters were not written for it.
    """
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        release = None
    for first, end, interface in _RANGES:
        if release is not None and first <= release < end:
            return interface
    raise UnsupportedOptionError(
        f"vLLM {version} is not one that attn-vllm is written for; declared: {DECLARED}.",
        hint="install one of those, or unset ATTN_VLLM_BACKEND to run vLLM's own backends.",
    )
