"""Small files of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

__all__ = ["parse_cpu_list", "read_number", "read_text"]


def read_text(path: Path) -> str | None:
    """Return a file's text without the white space around it; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """Return the integer that a file holds; None if there is no file or it holds something else."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read the kernel's list format: "0-3,8" is (0, 1, 2, 3, 8); "" is ()."""
    cpus: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)
