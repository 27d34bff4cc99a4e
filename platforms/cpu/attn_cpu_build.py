"""The build backend: scikit-build-core, or a wheel without kernels where none can be built.

ATTN_CPU_KERNELS decides: "auto" (the default) builds the kernels where torch and a C++ compiler are
at hand and else a pure wheel, "required" fails there instead, "off" never builds them. An error of
the compiler is an error in each case: a wheel is never pure by accident.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from find_torch import find_torch
from scikit_build_core import build as backend

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
    "why_not",
]

Settings = Mapping[str, str | list[str]] | None

_CHOICES = ("auto", "required", "off")
_COMPILERS = ("c++", "g++", "clang++")

build_sdist = backend.build_sdist
get_requires_for_build_sdist = backend.get_requires_for_build_sdist


def why_not(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why no kernels are built here; None: they are.

    Raises:
        SystemExit: ATTN_CPU_KERNELS has another value, or it is "required" and they cannot be.
    """
    choice = environ.get("ATTN_CPU_KERNELS", "auto")
    if choice not in _CHOICES:
        allowed = ", ".join(_CHOICES)
        raise SystemExit(f"ATTN_CPU_KERNELS={choice!r} is not allowed; allowed: {allowed}.")
    if choice == "off":
        return "ATTN_CPU_KERNELS=off"
    reason = _missing(environ)
    if reason and choice == "required":
        raise SystemExit(f"ATTN_CPU_KERNELS=required, and {reason}.")
    return reason


def _missing(environ: Mapping[str, str]) -> str | None:
    if sys.platform == "win32":
        return "the kernels are not built on Windows"
    compilers = (environ["CXX"],) if "CXX" in environ else _COMPILERS
    if not any(map(shutil.which, compilers)):
        return f"no C++ compiler was found ({', '.join(compilers)})"
    try:
        find_torch()
    except LookupError as error:
        return f"{error}; install torch and pip install with --no-build-isolation"
    return None


def _settled(settings: Settings) -> dict[str, str | list[str]]:
    """Return the settings, without CMake where no kernels are built."""
    settled = dict(settings or {})
    reason = None if "wheel.cmake" in settled else why_not()
    if reason is not None:
        settled["wheel.cmake"] = "false"
        sys.stderr.write(f"attn-cpu: a wheel without kernels: {reason}.\n")
    return settled


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return what the build needs: nothing where no kernels are built."""
    return list(backend.get_requires_for_build_wheel(_settled(config_settings)))


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return what the build needs: nothing where no kernels are built."""
    return list(backend.get_requires_for_build_editable(_settled(config_settings)))


def prepare_metadata_for_build_wheel(folder: str, config_settings: Settings = None) -> str:
    """Write the metadata."""
    return backend.prepare_metadata_for_build_wheel(folder, _settled(config_settings))


def prepare_metadata_for_build_editable(folder: str, config_settings: Settings = None) -> str:
    """Write the metadata."""
    return backend.prepare_metadata_for_build_editable(folder, _settled(config_settings))


def build_wheel(
    folder: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel."""
    return backend.build_wheel(folder, _settled(config_settings), metadata_directory)


def build_editable(
    folder: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that points to the sources."""
    return backend.build_editable(folder, _settled(config_settings), metadata_directory)
