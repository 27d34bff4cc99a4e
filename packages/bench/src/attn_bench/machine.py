"""Which machine this is and what is installed, as results say it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from attn_bench.results import Machine
from attn_shared import __version__
from attn_shared.device import Vendor
from attn_shared.selector import DEFAULT_SELECTOR

__all__ = ["describe_machine", "installed_versions", "load_note"]

_AMD_DRIVER = Path("/sys/module/amdgpu/version")
_NVIDIA_SMI = ("--query-gpu=driver_version", "--format=csv,noheader")
_BUSY = 0.25  # of the processors; a load below it is the start of the run itself


def describe_machine(device: torch.device, notes: Iterable[str] = ()) -> Machine:
    """Return what is known of a torch device of this machine.

    Raises:
        NoBackendError: no installed platform has such a device.
    """
    facts = DEFAULT_SELECTOR.device_facts(device)
    return Machine(
        name=facts.name,
        arch=facts.arch,
        compute_units=facts.compute_units,
        memory_bytes=facts.memory_bytes,
        threads=torch.get_num_threads(),
        driver=_driver(facts.vendor, device),
        isa=facts.isa,
        notes=tuple(notes),
    )


def _driver(vendor: Vendor, device: torch.device) -> str | None:
    match vendor:
        case Vendor.CPU:
            return f"{platform.system()} {platform.release().split('-')[0]}"
        case Vendor.NVIDIA:
            return _nvidia_driver()
        case Vendor.AMD:
            return _first_line(_AMD_DRIVER)
    properties = torch.get_device_module(device).get_device_properties(device)
    version = getattr(properties, "driver_version", None)
    return None if version is None else str(version)


def _nvidia_driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *_NVIDIA_SMI], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # it is there and does not answer: the driver's version stays unknown
    return done.stdout.split("\n", 1)[0].strip() or None


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").split("\n", 1)[0].strip() or None
    except OSError:
        return None


def load_note() -> str:
    """Say how much other work this machine had in the last minute; "" where none or unknown."""
    if not hasattr(os, "getloadavg"):
        return ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < _BUSY * cores:
        return ""
    return f"load average {load:.1f} on {cores} processors when it began: other work ran beside"


def installed_versions(libraries: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the versions that figures depend on.

    Args:
        libraries: of vendors, by name.
    """
    found = {
        "attn": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.version.hip is not None:
        found["hip"] = torch.version.hip
    with suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return found | dict(libraries or {})
