"""Print what the CUDA driver lists, as JSON: a script of the standard library alone.

It runs in a process of its own, since cuInit leaves a process that cannot use CUDA after a fork.
Functions and constants are those of cuda.h.
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid
from collections.abc import Callable
from typing import Any

__all__ = ["main"]

_MULTIPROCESSORS = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76


def main() -> int:
    """Print {"cuda_version": ..., "devices": [...]} or {"error": ...}; 1 for the latter."""
    try:
        result = _read(_load())
    except (OSError, RuntimeError, AttributeError) as error:
        result = {"error": str(error)}
    json.dump(result, sys.stdout)
    return int("error" in result)


def _load() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _read(cuda: Any) -> dict[str, Any]:
    _call(cuda, "cuInit", ctypes.c_uint(0))
    version = _number(cuda, "cuDriverGetVersion")
    count = _number(cuda, "cuDeviceGetCount")
    return {"cuda_version": version, "devices": [_device(cuda, index) for index in range(count)]}


def _device(cuda: Any, index: int) -> dict[str, Any]:
    device = ctypes.c_int()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    name, bus_id = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    _call(cuda, "cuDeviceGetName", name, ctypes.c_int(len(name)), device)
    _call(cuda, "cuDeviceGetPCIBusId", bus_id, ctypes.c_int(len(bus_id)), device)
    identifier, memory = ctypes.create_string_buffer(16), ctypes.c_size_t()
    _call(cuda, "cuDeviceGetUuid", identifier, device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return {
        "uuid": f"GPU-{uuid.UUID(bytes=identifier.raw)}",
        "name": name.value.decode(errors="replace"),
        "capability": [
            _attribute(cuda, _CAPABILITY_MAJOR, device),
            _attribute(cuda, _CAPABILITY_MINOR, device),
        ],
        "memory_bytes": memory.value,
        "compute_units": _attribute(cuda, _MULTIPROCESSORS, device),
        "pci_bus_id": bus_id.value.decode(errors="replace"),
    }


def _number(cuda: Any, name: str) -> int:
    value = ctypes.c_int()
    _call(cuda, name, ctypes.byref(value))
    return value.value


def _attribute(cuda: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
    return value.value


def _call(cuda: Any, name: str, *arguments: Any) -> None:
    function: Callable[..., int] = getattr(cuda, name)
    status = function(*arguments)
    if status != 0:
        raise RuntimeError(f"{name}: {_words(cuda, status)} (CUDA error {status})")


def _words(cuda: Any, status: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
    return (text.value or b"unknown error").decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
