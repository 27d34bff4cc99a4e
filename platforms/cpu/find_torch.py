"""Find the torch that the kernels are built against, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

__all__ = ["OLDEST", "find_torch", "main"]

OLDEST = (2, 10)
"""The first release with all that the kernels use of the stable ABI."""


def find_torch() -> tuple[Path, str]:
    """Return torch's folder and version.

    Raises:
        LookupError: there is none, or it is too old; says so.
    """
    wanted = ".".join(map(str, OLDEST))
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise LookupError(f"torch is not installed where the kernels are built (>= {wanted})")
    version = importlib.metadata.version("torch")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise LookupError(f"torch {version} is older than {wanted}")
    return Path(spec.origin).parent, version


def main() -> int:
    """Print folder and version as a list of CMake."""
    try:
        root, version = find_torch()
    except LookupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{root.as_posix()};{version}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
