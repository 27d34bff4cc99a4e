"""Where things are in this repository, for the checks beside this file."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Distribution", "distributions", "tracked_files"]

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Distribution:
    """One folder with a pyproject.toml of its own."""

    folder: Path

    @cached_property
    def project(self) -> dict[str, Any]:
        """The table `project` of its pyproject.toml."""
        text = (self.folder / "pyproject.toml").read_text(encoding="utf-8")
        project: dict[str, Any] = tomllib.loads(text)["project"]
        return project

    @property
    def name(self) -> str:
        """Its name on a package index, such as attn-shared."""
        return str(self.project["name"])

    @property
    def package(self) -> Path:
        """The folder of the package it holds, such as shared/src/attn_shared."""
        return self.folder / "src" / self.name.replace("-", "_")

    def modules(self) -> Iterator[Path]:
        """Its source files."""
        yield from sorted(self.package.rglob("*.py"))


def distributions() -> list[Distribution]:
    """All distributions, in the order of their folders."""
    found = [ROOT / "shared", *ROOT.glob("platforms/*"), *ROOT.glob("packages/*")]
    return [Distribution(path) for path in sorted(found) if (path / "pyproject.toml").is_file()]


def tracked_files() -> list[Path]:
    """The files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]
