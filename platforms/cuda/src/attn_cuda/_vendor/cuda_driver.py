"""The CUDA driver, asked in a child process: what CUDA itself shows, in its own order.

For machines whose NVML does not answer (WSL, Jetson) and for those whose GPUs differ. The child
obeys CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, since CUDA does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_cuda._vendor.nvml import DriverUnavailableError
from attn_cuda.gpus import DriverReading, Gpu

__all__ = ["ask_driver", "parse_answer"]

_CHILD = Path(__file__).with_name("cuda_driver_child.py")
_TIMEOUT_S = 60.0  # cuInit takes seconds where many GPUs wake up


def ask_driver(environ: Mapping[str, str]) -> DriverReading:
    """Run the child and return the GPUs that CUDA shows with this environment.

    Raises:
        DriverUnavailableError: the child failed; the text says how.
    """
    command = [sys.executable, "-I", str(_CHILD)]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverUnavailableError(f"the CUDA driver could not be asked: {error}") from error
    return parse_answer(done.stdout, done.stderr, done.returncode)


def parse_answer(stdout: str, stderr: str, status: int) -> DriverReading:
    """Read what the child printed.

    Raises:
        DriverUnavailableError: it printed an error, or nothing that can be read.
    """
    try:
        answer = json.loads(stdout)
    except json.JSONDecodeError as error:
        words = stderr.strip().rpartition("\n")[2] or "no words"
        raise DriverUnavailableError(
            f"the CUDA driver ended the process that asked it (exit status {status}: {words})"
        ) from error
    if "error" in answer:
        raise DriverUnavailableError(f"the CUDA driver does not answer: {answer['error']}")
    version = answer["cuda_version"]
    return DriverReading(
        source="the CUDA driver, asked in a child process",
        driver_version="",
        cuda_version=(version // 1000, version % 1000 // 10),
        gpus=tuple(map(_gpu, answer["devices"])),
    )


def _gpu(record: Mapping[str, Any]) -> Gpu:
    major, minor = record["capability"]
    return Gpu(
        uuid=record["uuid"],
        name=record["name"],
        capability=(major, minor),
        memory_bytes=record["memory_bytes"],
        compute_units=record["compute_units"],
        pci_bus_id=record["pci_bus_id"],
    )
