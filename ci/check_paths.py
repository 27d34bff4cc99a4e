"""Refuse traces of one developer's machine: absolute paths of homes and workplaces."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT, tracked_files

__all__ = ["main", "stray_paths"]

FOLDERS = ("root", "work", "workspace", r"home/\w+", r"Users/\w+", "opt/attn")
STRAY = re.compile(rf"(?:file://|(?<![\w./~)}}\]-]))/(?:{'|'.join(FOLDERS)})(?=[/\s\"'`:),;]|$)")


def stray_paths(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers and the lines that hold such a path."""
    for number, line in enumerate(text.splitlines(), start=1):
        if STRAY.search(line):
            yield number, line.strip()


def text_of(path: Path) -> str:
    """The file's text; nothing for a file that is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def main() -> int:
    """Print each stray path; 1 if there is one."""
    files = tracked_files()
    found = 0
    for path in files:
        for number, line in stray_paths(text_of(path)):
            print(f"{path.relative_to(ROOT)}:{number}: {line[:100]}")
            found += 1
    print(f"{len(files)} files, {found} stray paths")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
