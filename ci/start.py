"""Run sessions of noxfile.py on a machine that has Python and pip, and nothing else.

    python ci/start.py demo
    python ci/start.py tests
    python ci/start.py cuda -- --require-hardware
    python ci/start.py --list

Nox is installed into .venv-nox of this checkout on the first run; the user's own environment stays
as it is, so this also works where the system's Python refuses packages.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv-nox"
REQUIREMENTS = ROOT / "ci" / "requirements-nox.txt"
OLDEST = (3, 11)


def venv_python() -> Path:
    """The interpreter inside the environment that holds nox."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def pip_install(python: str | Path, *arguments: str) -> None:
    """Install with the pip of `python`."""
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *arguments], check=True)


def create_venv() -> None:
    """Make an empty environment, with the venv module or, where Debian left it out, virtualenv."""
    if importlib.util.find_spec("ensurepip") is not None:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        pip_install(sys.executable, "--target", folder, "virtualenv")
        command = [sys.executable, "-m", "virtualenv", "--clear", str(VENV)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": folder})


def stamp() -> str:
    """What the environment was made from: another interpreter or another list makes it anew."""
    return f"{sys.version}\n{REQUIREMENTS.read_text(encoding='utf-8')}"


def ensure_nox() -> None:
    """Make the environment unless it is there, whole and current."""
    marker = VENV / "made-from.txt"
    if marker.is_file() and marker.read_text(encoding="utf-8") == stamp():
        return
    print(f"Installing nox into {VENV.name} (once per checkout)", file=sys.stderr, flush=True)
    try:
        create_venv()
        pip_install(venv_python(), "-r", str(REQUIREMENTS))
    except (subprocess.CalledProcessError, KeyboardInterrupt):
        shutil.rmtree(VENV, ignore_errors=True)
        raise
    marker.write_text(stamp(), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run nox with the sessions named, or with options of nox passed as they are."""
    if sys.version_info < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        print(f"attn needs Python {wanted} or newer; this is {sys.version}", file=sys.stderr)
        return 2
    try:
        ensure_nox()
    except subprocess.CalledProcessError as error:
        print(f"Could not install nox: {error}", file=sys.stderr)
        return 1
    named = arguments and not arguments[0].startswith("-")
    command = [str(venv_python()), "-m", "nox", *(["-s"] if named else []), *arguments]
    return subprocess.call(command, cwd=ROOT)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
