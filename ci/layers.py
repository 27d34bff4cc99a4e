"""Layers of noxfile.py: environments whose packages others see through a .pth file."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import nox
from repository import ROOT

__all__ = ["TORCH", "create_environment", "has_venv", "ipex_layer", "layer", "link"]
__all__ += ["link_layers", "site_packages", "tools_layer", "torch_constraint", "torch_layer"]
__all__ += ["triton_layer"]

ENVIRONMENTS = Path(".nox")
TORCH = os.environ.get("ATTN_TORCH", "2.13.0")
TRITON = "3.7.1"  # the release that torch 2.13's GPU builds require
PYTHON_TAG = f"py{sys.version_info.major}{sys.version_info.minor}"


def has_venv(session: nox.Session) -> bool:
    """False with --no-venv, where the sessions use the current environment and install nothing."""
    return session.venv_backend != "none"


def torch_layer(session: nox.Session) -> Path:
    """The site-packages with torch, installed on first use."""
    return layer(session, f"torch-{TORCH}-{PYTHON_TAG}", f"torch=={TORCH}")


def triton_layer(session: nox.Session) -> Path:
    """The site-packages with Triton, which torch's CPU build does not bring."""
    return layer(session, f"triton-{TRITON}-{PYTHON_TAG}", f"triton=={TRITON}")


def tools_layer(session: nox.Session) -> Path:
    """The site-packages with ci/requirements.txt, installed on first use."""
    name = f"tools-{digest(*sorted(ROOT.glob('ci/requirements*.txt')))}-{PYTHON_TAG}"
    return layer(session, name, "-r", "ci/requirements.txt")


def ipex_layer(session: nox.Session) -> Path:
    """The site-packages with ci/ipex.txt, installed on first use."""
    name = f"ipex-{digest(ROOT / 'ci' / 'ipex.txt')}-{PYTHON_TAG}"
    return layer(session, name, "--no-deps", "-r", "ci/ipex.txt")


def digest(*paths: Path) -> str:
    """What tells lists of requirements apart."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:10]


def layer(session: nox.Session, name: str, *requirements: str) -> Path:
    """An environment by this name, made once and whole, and its site-packages."""
    location = ENVIRONMENTS / name
    complete = location / "complete.txt"
    if has_venv(session) and not complete.is_file():
        session.log(f"installing {name} (once)")
        python = create_environment(session, location)
        session.run(python, "-m", "pip", "install", "--quiet", *requirements, external=True)
        complete.write_text(site_packages(session, python), encoding="utf-8")
    return Path(complete.read_text(encoding="utf-8")) if complete.is_file() else location


def link_layers(session: nox.Session, *sites: Path) -> None:
    """Let this session's environment see the packages of these layers."""
    if has_venv(session):
        link(session, "python", *sites)


def link(session: nox.Session, python: str, *sites: Path) -> None:
    """Let the environment of `python` see these folders of packages."""
    own = Path(site_packages(session, python))
    (own / "attn-layers.pth").write_text("".join(f"{site}\n" for site in sites), encoding="utf-8")


def torch_constraint() -> str:
    """A constraint file that keeps pip from replacing the torch of the layer."""
    path = ENVIRONMENTS / f"torch-{TORCH}.txt"
    path.write_text(f"torch=={TORCH}\n", encoding="utf-8")
    return str(path)


def create_environment(session: nox.Session, location: Path) -> str:
    """An empty environment in this folder; returns its interpreter."""
    command = ("-m", "virtualenv", "--quiet", "--clear", "--no-periodic-update", str(location))
    session.run(sys.executable, *command, external=True)
    return str(location / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def site_packages(session: nox.Session, python: str) -> str:
    """The folder where this interpreter's environment keeps packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    printed = session.run(python, "-c", code, silent=True, log=False, external=True)
    return str(printed).strip()
