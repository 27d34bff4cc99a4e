"""Import a package and every module in it, but those of `_vendor` and `kernels`.

    python ci/import_all.py attn_shared

Run in an environment with nothing but the package's declared requirements, it shows that none is
missing from the list.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

__all__ = ["main"]


def main(name: str) -> int:
    """Import all of `name`, and say how many modules that were."""
    package = importlib.import_module(name)
    found = pkgutil.walk_packages(package.__path__, f"{name}.")
    names = [module.name for module in found if not is_left_out(module.name)]
    for module in names:
        importlib.import_module(module)
    print(f"{name}: {len(names) + 1} modules imported")
    return 0


def is_left_out(name: str) -> bool:
    """These modules import what an extra or torch's GPU build brings; `__main__` is the program."""
    return not {"_vendor", "kernels", "__main__"}.isdisjoint(name.split("."))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
