"""The CUDA toolkit that lies on this machine; nothing of it is started.

Libraries that compile kernels at first use (FlashInfer, torch's extensions) need its compiler, of
a version that the driver serves. It is looked for where torch looks (torch.utils.cpp_extension):
CUDA_HOME, CUDA_PATH, nvcc on the path, /usr/local/cuda. Its version is the one in its cuda.h; a
folder without that header counts only where no other has one, since nvcc on the path may be a
script that stands elsewhere.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Toolkit", "find_toolkit"]

_USUAL = Path("/usr/local/cuda")
_HEADERS = ("include/cuda.h", "targets/*/include/cuda.h")
_VERSION = re.compile(r"^#define\s+CUDA_VERSION\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """A toolkit.

    Attributes:
        path: its folder.
        version: (13, 0); None where its header is not installed.
        has_compiler: nvcc is there.
    """

    path: Path
    version: tuple[int, int] | None
    has_compiler: bool

    def __str__(self) -> str:
        """Read as "13.0 in /usr/local/cuda"."""
        version = "of unknown version" if self.version is None else "{}.{}".format(*self.version)
        compiler = "" if self.has_compiler else ", without nvcc"
        return f"{version} in {self.path}{compiler}"


def find_toolkit(
    environ: Mapping[str, str],
    *,
    which: Callable[[str], str | None] = shutil.which,
    usual: Path = _USUAL,
) -> Toolkit | None:
    """Return the first toolkit whose version is known, else the first that is there, or None.

    Args:
        environ: for CUDA_HOME and CUDA_PATH.
        which: finds a program on the path.
        usual: the folder that installers choose.
    """
    found = [
        Toolkit(path=folder, version=_version(folder), has_compiler=_has_compiler(folder))
        for folder in _folders(environ, which, usual)
        if folder.is_dir()
    ]
    known = (toolkit for toolkit in found if toolkit.version is not None)
    return next(known, found[0] if found else None)


def _folders(
    environ: Mapping[str, str], which: Callable[[str], str | None], usual: Path
) -> Iterator[Path]:
    yield from (Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name))
    compiler = which("nvcc")
    if compiler is not None:
        yield Path(compiler).resolve().parent.parent
    yield usual


def _has_compiler(folder: Path) -> bool:
    return any((folder / "bin" / name).is_file() for name in ("nvcc", "nvcc.exe"))


def _version(folder: Path) -> tuple[int, int] | None:
    """Return the version of the header; several targets of one toolkit share it."""
    for header in (path for pattern in _HEADERS for path in sorted(folder.glob(pattern))):
        try:
            found = _VERSION.search(header.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue  # listed and not readable: another may be
        if found is not None:
            number = int(found[1])
            return number // 1000, number % 1000 // 10
    return None
