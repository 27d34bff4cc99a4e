"""Makes the tests' shared module importable, whatever the import mode, and registers attn once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register "attn" as a user without environment would, whatever another test made of it."""
    import attn_transformers

    for name in ("ATTN_BACKEND", "ATTN_CHECKED"):
        monkeypatch.delenv(name, raising=False)
    attn_transformers.register()
    return
