"""One version number for all: the file VERSION, each distribution, its package, and sibling pins.

python ci/check_versions.py              check
python ci/check_versions.py --set 0.2.0  write the number everywhere

The licence is also the same file everywhere, since each distribution is handed on by itself.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

from repository import ROOT, Distribution, distributions

__all__ = ["main"]

VERSION_FILE = ROOT / "VERSION"
PLACES = (
    ("pyproject.toml", re.compile(r'(?m)^(version = ")([^"]*)(")$')),
    ("pyproject.toml", re.compile(r'("attn-[a-z-]+(?:\[[a-z0-9,]+\])?==)([^"]*)(")')),
    ("__init__.py", re.compile(r'(?m)^(__version__ = ")([^"]*)(")$')),
)


def main(arguments: list[str]) -> int:
    """Check, or write, the version; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", metavar="VERSION", help="write this number everywhere")
    wanted = parser.parse_args(arguments).set
    if wanted is not None:
        write(wanted)
    problems = [problem for dist in distributions() for problem in differences(dist, current())]
    print("\n".join(problems) or f"version {current()} everywhere")
    return int(bool(problems))


def current() -> str:
    """The number in the file VERSION."""
    return VERSION_FILE.read_text(encoding="utf-8").strip()


def write(version: str) -> None:
    """Put this number in every place that states it."""
    VERSION_FILE.write_text(f"{version}\n", encoding="utf-8")
    for dist in distributions():
        for name, pattern in PLACES:
            path = dist.folder / name if name == "pyproject.toml" else dist.package / name
            text = path.read_text(encoding="utf-8")
            path.write_text(pattern.sub(rf"\g<1>{version}\g<3>", text), encoding="utf-8")


def differences(dist: Distribution, version: str) -> Iterator[str]:
    """What in this distribution does not say `version`, or is not the project's licence."""
    where = dist.folder.relative_to(ROOT)
    if dist.project["version"] != version:
        yield f"{where}/pyproject.toml: version {dist.project['version']}, expected {version}"
    if f'\n__version__ = "{version}"\n' not in (dist.package / "__init__.py").read_text("utf-8"):
        yield f'{where}: {dist.package.name}/__init__.py lacks __version__ = "{version}"'
    for requirement in requirements(dist):
        if requirement.startswith("attn-") and not requirement.endswith(f"=={version}"):
            yield f"{where}/pyproject.toml: {requirement} is not pinned to =={version}"
    if (dist.folder / "LICENSE").read_bytes() != (ROOT / "LICENSE").read_bytes():
        yield f"{where}/LICENSE differs from the project's"


def requirements(dist: Distribution) -> Iterator[str]:
    """Everything that it requires, extras included."""
    yield from dist.project["dependencies"]
    for extra in dist.project.get("optional-dependencies", {}).values():
        yield from extra


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
