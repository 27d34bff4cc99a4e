"""What was run on which hardware: records with their provenance, kept as data in this package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from attn_shared.device import DeviceFacts, Vendor, parse_arch
from attn_shared.errors import InvalidInputError

__all__ = ["RUNS_SCHEMA_VERSION", "HardwareRun", "cpu_level", "known_runs", "runs_text", "with_run"]

RUNS_SCHEMA_VERSION = 1

_CPU_LEVELS = (
    *("amx_bf16", "avx512_bf16", "avx512f", "avx2"),
    *("svebf16", "sve", "asimd"),
)
"""Levels between which kernels for CPUs choose, the highest first, as Linux spells them."""


def cpu_level(isa: Iterable[str]) -> str | None:
    """Return the highest level among a CPU's instruction sets; None where none is listed."""
    present = set(isa)
    return next((level for level in _CPU_LEVELS if level in present), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRun:
    """One run of a backend on a device, that may be counted on.

    Attributes:
        backend: the backend's name.
        arch: canonical name of the architecture, "sm_90".
        cpu_level: of a CPU, the highest instruction-set level that it has; None for a GPU.
        device: the device's own name.
        date: the day of the run, "2026-12-01".
        versions: what was installed: (name, version).
        what: what was run.
        passed, failed, expected, excluded: cases, by what became of them; None: not counted.
        record: where the run is written down or repeated.
    """

    backend: str
    arch: str
    cpu_level: str | None = None
    device: str
    date: str
    versions: tuple[tuple[str, str], ...] = ()
    what: str
    passed: int
    failed: int = 0
    expected: int | None = None
    excluded: int | None = None
    record: str

    def covers(self, device: DeviceFacts) -> bool:
        """Whether this was run on such a device: its architecture, and of a CPU its level."""
        return device.arch == self.arch and cpu_level(device.isa) == self.cpu_level

    @property
    def _subject(self) -> tuple[str | None, ...]:
        return (self.backend, self.arch, self.cpu_level, self.device, self.what)

    def counts(self) -> str:
        """Return "524 passed, 65 excluded"."""
        named = ("passed", "failed", "expected", "excluded")
        counted = {name: getattr(self, name) for name in named}
        return ", ".join(f"{count} {name}" for name, count in counted.items() if count)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        return {**asdict(self), "versions": dict(self.versions)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> HardwareRun:
        """Return the run that `to_dict` wrote.

        Raises:
            InvalidInputError: a key is missing or unknown.
        """
        try:
            return cls(**{**record, "versions": tuple(record["versions"].items())})
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError.for_argument(
                "a hardware run", f"{dict(record)} ({error})", "the fields of HardwareRun"
            ) from error

    @classmethod
    def from_report(cls, report: Mapping[str, Any], *, date: str, record: str) -> HardwareRun:
        """Return the run that a report of the conformance suite tells of.

        Args:
            report: what `attn verify NAME --json` prints.
            date: the day of the run.
            record: where the report is kept, or what repeats it.

        Raises:
            InvalidInputError: it is no such report, it ran no case or some rules alone, or a case
                failed: then it is nothing to count on.
        """
        try:
            return _from_report(report, date=date, record=record)
        except (KeyError, TypeError) as error:
            raise InvalidInputError.for_argument(
                "report", f"without {error}", "the JSON of attn verify NAME --json"
            ) from error


_DEVICE = re.compile(r"[^:]+(?::\d+)?: (?P<name>.+) \((?P<arch>[^()]+)\)")


def _from_report(report: Mapping[str, Any], *, date: str, record: str) -> HardwareRun:
    facts, total = report["facts"], report["total"]
    device = _DEVICE.fullmatch(facts["device"])
    if device is None:
        raise InvalidInputError.for_argument(
            "device of the report", repr(facts["device"]), "'PLACE: NAME (ARCHITECTURE)'"
        )
    if not report["ok"] or not total["passed"]:
        words = f"{total['failed']} failed and {total['passed']} passed cases"
        raise InvalidInputError.for_argument(
            "report", f"of {words}, problems {report['problems']}", "a run that passed"
        )
    level = cpu_level(facts.get("isa", "").split())
    if level is None and parse_arch(device["arch"]).vendor is Vendor.CPU:
        raise InvalidInputError.for_argument(
            "isa of the report", repr(facts.get("isa")), "the instruction sets of its CPU"
        )
    source, _, version = facts["source"].partition(" ")
    return HardwareRun(
        backend=facts["backend"],
        arch=device["arch"],
        cpu_level=level,
        device=device["name"],
        date=date,
        versions=(("torch", facts["torch"]), ("python", facts["python"]), (source, version)),
        what=f"conformance suite, depth {facts['depth']}",
        passed=total["passed"],
        failed=total["failed"],
        expected=total["expected"],
        excluded=total["excluded"],
        record=record,
    )


def known_runs(text: str | None = None) -> tuple[HardwareRun, ...]:
    """Return the runs that are on record.

    Args:
        text: JSON as `runs_text` writes it; this package's own file by default.

    Raises:
        InvalidInputError: the JSON is of another version, or a run has other fields.
    """
    if text is None:
        own = resources.files("attn_cli.matrix").joinpath("hardware_runs.json")
        text = own.read_text(encoding="utf-8")
    data = json.loads(text)
    if data["schema_version"] != RUNS_SCHEMA_VERSION:
        raise InvalidInputError.for_argument(
            "schema_version of the hardware runs", data["schema_version"], str(RUNS_SCHEMA_VERSION)
        )
    return tuple(HardwareRun.from_dict(run) for run in data["runs"])


def with_run(runs: Iterable[HardwareRun], run: HardwareRun) -> list[HardwareRun]:
    """Return the runs with one more, in the place of one of the same on the same hardware."""
    return [*(other for other in runs if other._subject != run._subject), run]


def runs_text(runs: Iterable[HardwareRun]) -> str:
    """Return runs as the JSON of the file, in an order of their own."""
    ordered = sorted(runs, key=lambda run: (run.backend, run.arch, run.date, run.what))
    data = {
        "schema_version": RUNS_SCHEMA_VERSION,
        "runs": [run.to_dict() for run in ordered],
    }
    return json.dumps(data, indent=2) + "\n"
