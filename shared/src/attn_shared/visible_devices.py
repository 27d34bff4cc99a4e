"""Lists of visible devices: CUDA_, HIP_ and ROCR_VISIBLE_DEVICES, ZE_AFFINITY_MASK.

These variables filter and reorder what a runtime shows. They are read here from a string, so
that a platform can map its devices to the driver's without starting the driver.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

__all__ = ["VisibleDevice", "VisibleDeviceKind", "VisibleDevices", "parse_visible_devices"]


class VisibleDeviceKind(StrEnum):
    """How an entry names its device."""

    ORDINAL = "ordinal"
    UUID = "uuid"
    MIG = "mig"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevice:
    """One entry of a list.

    Attributes:
        kind: how the device is named.
        value: the entry, "2", "0.1", "GPU-8932f937", "MIG-GPU-8932f937/1/0".
        ordinal: the driver's number of the device; None unless `kind` is "ordinal".
        sub_devices: numbers below the ordinal: (1,) for tile 1 of "0.1".
        parent_uuid: the GPU of a "MIG-GPU-.../gi/ci" entry, "GPU-8932f937".
        gpu_instance: its GPU instance.
        compute_instance: its compute instance.
    """

    kind: VisibleDeviceKind
    value: str
    ordinal: int | None = None
    sub_devices: tuple[int, ...] = ()
    parent_uuid: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None

    def matches_uuid(self, uuid: str) -> bool:
        """Whether a device's full UUID is meant; an entry may give only its beginning.

        Args:
            uuid: with or without "GPU-" or "MIG-" before it.
        """
        if self.kind is VisibleDeviceKind.ORDINAL:
            return False
        return _bare(uuid).startswith(_bare(self.value))


class VisibleDevices(tuple[VisibleDevice, ...]):
    """The devices of a list in its order; `problem` says what was wrong with it, "" if nothing."""

    problem: str

    def __new__(cls, devices: tuple[VisibleDevice, ...] = (), *, problem: str = "") -> Self:
        """Hold `devices`, and what was wrong with the list that named them."""
        self = super().__new__(cls, devices)
        self.problem = problem
        return self


_NO_DEVICES = frozenset({"", "-1", "NoDevFiles"})  # Slurm writes the last for a job without GPUs

_HEX = "[0-9a-fA-F]"
_ORDINAL = re.compile(r"([+-]?[0-9]{1,9})(?![0-9]).*", re.DOTALL)  # bounded: int() is, too
_SUB_DEVICE = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})+")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)*")
_GPU_UUID = re.compile(rf"GPU-(?:{_HEX}[-0-9a-fA-F]*|XX)")  # an AMD part without a UUID says XX
_MIG_UUID = re.compile(rf"MIG-{_HEX}[-0-9a-fA-F]*")
_MIG_PATH = re.compile(rf"MIG-(GPU-{_HEX}[-0-9a-fA-F]*)/([0-9]{{1,9}})/([0-9]{{1,9}})")


def parse_visible_devices(
    value: str | None, *, repeats_allowed: bool = False
) -> VisibleDevices | None:
    """Read a list of visible devices; never raises.

    The rules are CUDA's, which HIP follows: the list ends before its first invalid entry, a number
    ends at its first other character ("1gpu" is 1), and a list that repeats an entry shows no
    device. Whether the devices exist only the driver knows.

    Args:
        value: the variable's value; None if it is not set.
        repeats_allowed: count a repeated entry once, as Level Zero does for ZE_AFFINITY_MASK.

    Returns:
        None if all devices are visible, else the devices in order, with `problem` if any.
    """
    if value is None:
        return None
    if value.strip() in _NO_DEVICES:
        return VisibleDevices()
    devices: dict[VisibleDevice, None] = {}
    problem = ""
    for entry in (part.strip() for part in value.split(",")):
        device = _parse_entry(entry)
        if device is None:
            problem = f"{entry!r} names no device and ends the list"
            break
        if device in devices and not repeats_allowed:
            return VisibleDevices(problem=f"{device.value!r} is repeated: no device is visible")
        if device.ordinal is not None and not _WHOLE_NUMBER.fullmatch(entry):
            problem = f"{entry!r} is read as {device.value}"
        devices[device] = None
    return VisibleDevices(tuple(devices), problem=problem)


def _parse_entry(entry: str) -> VisibleDevice | None:
    for parse in (_parse_mig, _parse_uuid, _parse_sub_device, _parse_ordinal):
        device = parse(entry)
        if device is not None:
            return device
    return None


def _parse_mig(entry: str) -> VisibleDevice | None:
    if _MIG_UUID.fullmatch(entry):
        return VisibleDevice(kind=VisibleDeviceKind.MIG, value=entry)
    match = _MIG_PATH.fullmatch(entry)
    if match is None:
        return None
    return VisibleDevice(
        kind=VisibleDeviceKind.MIG,
        value=entry,
        parent_uuid=match[1],
        gpu_instance=int(match[2]),
        compute_instance=int(match[3]),
    )


def _parse_uuid(entry: str) -> VisibleDevice | None:
    if not _GPU_UUID.fullmatch(entry):
        return None
    return VisibleDevice(kind=VisibleDeviceKind.UUID, value=entry)


def _parse_sub_device(entry: str) -> VisibleDevice | None:
    if not _SUB_DEVICE.fullmatch(entry):
        return None
    ordinal, *below = (int(part) for part in entry.split("."))
    return VisibleDevice(
        kind=VisibleDeviceKind.ORDINAL,
        value=".".join(map(str, (ordinal, *below))),
        ordinal=ordinal,
        sub_devices=tuple(below),
    )


def _parse_ordinal(entry: str) -> VisibleDevice | None:
    match = _ORDINAL.fullmatch(entry)
    ordinal = int(match[1]) if match else -1
    if ordinal < 0:
        return None
    return VisibleDevice(kind=VisibleDeviceKind.ORDINAL, value=str(ordinal), ordinal=ordinal)


def _bare(uuid: str) -> str:
    """Drop what runtimes put before a UUID, and its case."""
    return uuid.lower().removeprefix("mig-").removeprefix("gpu-")
