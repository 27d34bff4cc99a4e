"""Hold functions and files to the sizes that keep them readable.

Fails on a function of more than 80 lines or a source file of more than 500; names those of more
than 40 and 350. A function that is one algorithm, a kernel for instance, may say so in a comment
`# size: REASON` on its `def` line; the file that holds it may then be longer too.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT, distributions

__all__ = ["Measured", "main", "measure"]

FUNCTION_ADVISED, FUNCTION_MOST = 40, 80
FILE_ADVISED, FILE_MOST = 350, 500
EXEMPTION = "# size: "


@dataclass(frozen=True)
class Measured:
    """A function or a file, and how long it is."""

    where: str
    lines: int
    advised: int
    most: int
    is_exempt: bool

    @property
    def is_failure(self) -> bool:
        """Longer than is allowed, without a reason given."""
        return self.lines > self.most and not self.is_exempt


def measure(source: str, where: str) -> Iterator[Measured]:
    """Measure the functions of a source text, then the whole of it."""
    lines = source.splitlines()
    exempt = False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            own = EXEMPTION in lines[node.lineno - 1]
            exempt = exempt or own
            place = f"{where}:{node.lineno} {node.name}"
            yield Measured(place, length, FUNCTION_ADVISED, FUNCTION_MOST, own)
    yield Measured(where, len(lines), FILE_ADVISED, FILE_MOST, exempt)


def source_files() -> list[Path]:
    """What is measured: the packages, and the tools of this folder."""
    packages = [path for dist in distributions() for path in dist.modules()]
    return [*packages, ROOT / "noxfile.py", ROOT / "conftest.py", *sorted(ROOT.glob("ci/*.py"))]


def main() -> int:
    """Print what is longer than advised; 1 if something is longer than allowed."""
    found: list[Measured] = []
    for path in source_files():
        found += measure(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    for item in sorted(found, key=lambda item: -item.lines):
        if item.lines > item.advised:
            word = "too long" if item.is_failure else "long"
            print(f"{word}: {item.where}: {item.lines} lines (advised {item.advised})")
    functions = [item.lines for item in found if item.most == FUNCTION_MOST]
    median = statistics.median(functions)
    print(f"{len(functions)} functions, median {median:.0f} lines, longest {max(functions)}")
    return int(any(item.is_failure for item in found))


if __name__ == "__main__":
    sys.exit(main())
