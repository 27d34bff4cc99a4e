from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Rows = list[dict[str, Any]]

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:  # for what the tests share, whatever the import mode
    sys.path.insert(0, _HERE)


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], Rows]:
    """Read recorded decisions, from ATTN_ORACLE_DIR or from shared/oracle beside the checkout."""
    default = Path(__file__).resolve().parents[3] / "shared" / "oracle"
    folder = Path(os.environ.get("ATTN_ORACLE_DIR") or default)

    def read(name: str) -> Rows:
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            pytest.skip(f"no recorded decisions (ATTN_ORACLE_DIR): {path.name}")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


@pytest.fixture
def write_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """Write importable modules, which are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    written: list[str] = []

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)
