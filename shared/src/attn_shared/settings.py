"""Environment variables `ATTN_*`, read in this one place.

Only the command line and the integrations call `from_environ`; selection and backends read no
environment, and what was read here is shown in the selection's notes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from attn_shared.errors import InvalidRequestError
from attn_shared.selection import Policy

__all__ = ["VARIABLES", "Settings", "from_environ"]

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "ATTN_BACKEND": "name of the backend to use, or auto",
        "ATTN_CACHE_DIR": "folder for converted models and measured tables",
        "ATTN_CHECKED": "1: validate the contents of every batch (synchronises the device)",
        "ATTN_VLLM_BACKEND": "attn-vllm: backend of vLLM's layers, or auto; unset: vLLM's own",
        "ATTN_TORCH": "requirement of torch for the project's own nox sessions",
        "ATTN_ORACLE_DIR": "folder of recorded decisions for the project's own tests",
    }
)
"""Every variable, with what it means."""

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks for.

    Attributes:
        backend: `ATTN_BACKEND`, None for auto.
        cache_dir: `ATTN_CACHE_DIR`, None for the user's default cache folder.
        checked: `ATTN_CHECKED`.
        vllm_backend: `ATTN_VLLM_BACKEND`, "auto" included; None where it is unset or empty.
        unknown: variables of the form ATTN_* that mean nothing, to be shown to the user.
    """

    backend: str | None = None
    cache_dir: Path | None = None
    checked: bool = False
    vllm_backend: str | None = None
    unknown: tuple[str, ...] = ()

    def policy(self, backend: str | None = None) -> Policy:
        """Return the policy of a call: an argument wins over the environment.

        Args:
            backend: what the caller named; "auto" overrides the environment, None leaves it.
        """
        if backend is not None:
            return Policy(backend=None if backend == "auto" else backend)
        return Policy(backend=self.backend, source="environment variable ATTN_BACKEND")

    def notes(self) -> tuple[str, ...]:
        """Return what was read, and what was there and not understood, for a person to see."""
        notes = []
        if self.backend is not None:
            notes.append(f"ATTN_BACKEND={self.backend} is set")
        notes.extend(f"{name} is set and unknown; known: {_KNOWN}" for name in self.unknown)
        return tuple(notes)


_KNOWN = ", ".join(sorted(VARIABLES))


def from_environ(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environ: the environment; the process's own by default.

    Raises:
        InvalidRequestError: a variable has a value that it cannot have.
    """
    environ = os.environ if environ is None else environ
    backend = environ.get("ATTN_BACKEND", "").strip()
    cache_dir = environ.get("ATTN_CACHE_DIR", "").strip()
    return Settings(
        backend=None if backend.lower() in ("", "auto") else backend,
        cache_dir=Path(cache_dir) if cache_dir else None,
        checked=_flag(environ, "ATTN_CHECKED"),
        vllm_backend=environ.get("ATTN_VLLM_BACKEND", "").strip() or None,
        unknown=tuple(
            sorted(name for name in environ if name.startswith("ATTN_") and name not in VARIABLES)
        ),
    )


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise InvalidRequestError.for_field(name, value, "1 or 0")
