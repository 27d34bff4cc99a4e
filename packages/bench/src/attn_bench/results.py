"""The one JSON form of every benchmark: what it holds, and reading and writing it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from attn_bench.medians import interval, median
from attn_bench.records import from_record
from attn_bench.workloads import Workload
from attn_shared.dtypes import dtype_name
from attn_shared.errors import InvalidInputError

__all__ = [
    "SCHEMA_VERSION",
    "Cell",
    "Limits",
    "Machine",
    "Rate",
    "Results",
    "Settings",
    "Skipped",
    "SkippedStatus",
    "read_results",
    "shape_fields",
    "write_results",
]

SCHEMA_VERSION = 1
"""Grows when a key changes its meaning or goes away; new keys may come at any time."""

Interval = tuple[float, float]
"""Both ends of a 95% bootstrap interval of a median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it was measured. It has no host's name and no serial number.

    Attributes:
        name: of the device, "NVIDIA H200".
        arch: "sm_90", "x86_64".
        compute_units: SMs, CUs, Xe cores or physical cores; null if unknown.
        memory_bytes: of the device; null if unknown.
        threads: of torch on the host.
        driver: version of the device's driver, of the kernel for a CPU; null if unknown.
        isa: instruction-set levels of a CPU.
        notes: what a reader must know, such as that other work ran beside.
    """

    name: str
    arch: str
    compute_units: int | None
    memory_bytes: int | None
    threads: int
    driver: str | None
    isa: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How it was measured.

    Attributes:
        rounds: rounds per cell.
        cache_state: "cold" or "warm".
        graph: decode calls were captured in graphs where the backend allows it.
    """

    rounds: int = 15
    cache_state: str = "cold"
    graph: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.rounds < 1:
            raise InvalidInputError.for_argument("rounds", self.rounds, "an integer >= 1")
        if self.cache_state not in ("cold", "warm"):
            raise InvalidInputError.for_argument("cache_state", self.cache_state, "cold or warm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate over a run.

    Attributes:
        median, interval: of the samples.
        samples: the median of each group's rounds, which a run that goes on adds to.
    """

    median: float
    interval: Interval
    samples: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples: tuple[float, ...]) -> Rate:
        """Return the rate of some samples, at least one."""
        return cls(median=median(samples), interval=interval(samples), samples=samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine could do, measured in the same rounds as the cells.

    Attributes:
        read_gb_per_s: 1e9 bytes per second, summing memory that no cache holds.
        matmul_tflop_per_s: 1e12 operations per second of a square matrix product, by dtype.
    """

    read_gb_per_s: Rate | None = None
    matmul_tflop_per_s: Mapping[str, Rate] = field(default_factory=dict)

    def with_rounds(self, dtype: str, read: Sequence[float], matmul: Sequence[float]) -> Limits:
        """Return the limits with the rounds of one more group, whose workload is of `dtype`."""
        older = self.matmul_tflop_per_s.get(dtype)
        return Limits(
            read_gb_per_s=_joined(self.read_gb_per_s, read),
            matmul_tflop_per_s={**self.matmul_tflop_per_s, dtype: _joined(older, matmul)},
        )


def _joined(older: Rate | None, rounds: Sequence[float]) -> Rate:
    return Rate.of((*(() if older is None else older.samples), median(rounds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One backend, one workload, and one peer or none.

    Attributes:
        backend: what was measured.
        peer: what it was measured beside, in the same rounds.
        phase, label: the workload and its lengths in a few characters.
        batch, context, query_len: requests, keys and query tokens of the longest.
        num_heads, num_kv_heads, head_size, dtype, kv_cache_dtype, block_size: the layer.
        shared_prefix_len: tokens that all requests share as the same blocks.
        window: keys that a row sees, its own included; null: all up to its own.
        returns_lse: the call also returned the logarithm of each row's denominator.
        own_output: the call returned a tensor of its own instead of writing into one it was given.
        time_us, interval_us: a call of the backend.
        peer_time_us, peer_interval_us: a call of the peer.
        ratio, ratio_interval: ours / peer, the median of the rounds' own ratios.
        gb_per_s: bytes that must be moved over time_us, in 1e9 per second.
        tflop_per_s: operations that must be done over time_us, in 1e12 per second.
        share_of_read, share_of_matmul: the same against the machine's limits in the same rounds.
        host_us, peer_host_us: the host's time to issue a call outside a graph; null where it does
            all of the work. Without a graph, a call takes no less than this.
        host_interval_us, peer_host_interval_us: of that median.
        plan_us, peer_plan_us: the host's work of a step, shared by all layers of a model, with the
            device's part of it.
        plan_host_us, peer_plan_host_us: the same until the host may go on, of a few in a row.
        plan_waits, peer_plan_waits: whether that makes the host wait for the device, as far as
            torch can tell; null where it cannot.
        cache_state: "cold": inputs are in no cache; "warm": right after the same call.
        mode, peer_mode: "eager", or "graph" for a captured call.
        rounds: how many were measured.
        notes: what a reader must know.
        head_size_v: width of values where it is not that of keys: latent attention.
    """

    backend: str
    peer: str | None
    phase: str
    label: str
    batch: int
    context: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_cache_dtype: str
    block_size: int | None
    shared_prefix_len: int
    time_us: float
    interval_us: Interval
    peer_time_us: float | None
    peer_interval_us: Interval | None
    ratio: float | None
    ratio_interval: Interval | None
    gb_per_s: float
    tflop_per_s: float
    share_of_read: float
    share_of_matmul: float
    host_us: float | None
    plan_us: float | None
    cache_state: str
    mode: str
    peer_mode: str | None
    rounds: int
    peer_host_us: float | None = None
    host_interval_us: Interval | None = None
    peer_host_interval_us: Interval | None = None
    peer_plan_us: float | None = None
    plan_host_us: float | None = None
    peer_plan_host_us: float | None = None
    plan_waits: bool | None = None
    peer_plan_waits: bool | None = None
    window: int | None = None
    returns_lse: bool = False
    own_output: bool = False
    notes: tuple[str, ...] = ()
    head_size_v: int | None = None

    @property
    def heads(self) -> str:
        """The layer's shape, as "32/8x128"; "16/1x576:512" with values of another width."""
        value = "" if self.head_size_v is None else f":{self.head_size_v}"
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}{value}"

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells a cell from others of the same run."""
        return (self.backend, self.peer, self.block_size, self.kv_cache_dtype, *_workload_key(self))


class SkippedStatus(StrEnum):
    """Why there is no figure."""

    REFUSED = "refused"
    """The contender does not serve the workload, or took a slow path silently."""
    WRONG = "wrong"
    """It answered something else than attention."""
    FAILED = "failed"
    """It raised what is nobody's expected error."""
    MEMORY = "memory"
    BUDGET = "budget"
    """Time was used up before its turn came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What was asked for and not measured.

    Attributes:
        backend: which backend's cell is missing.
        peer: the peer that is missing beside it; null: the backend itself was not measured.
        status: the kind of reason.
        reason: in words.
        exit_code: of the error behind it.
        phase, label, batch, context, query_len: the workload, as in `Cell`.
        num_heads, num_kv_heads, head_size, dtype, kv_cache_dtype: the layer, as in `Cell`.
        shared_prefix_len, window, returns_lse, own_output, head_size_v: as in `Cell`.
    """

    backend: str
    peer: str | None
    status: SkippedStatus
    reason: str
    exit_code: int
    phase: str
    label: str
    batch: int
    context: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_cache_dtype: str
    shared_prefix_len: int
    window: int | None = None
    returns_lse: bool = False
    own_output: bool = False
    head_size_v: int | None = None


def shape_fields(workload: Workload) -> dict[str, Any]:
    """Return the fields that `Cell` and `Skipped` take from a workload."""
    return {
        "phase": str(workload.phase),
        "label": workload.shape,
        "batch": workload.batch,
        "context": workload.context,
        "query_len": workload.query_len,
        "num_heads": workload.heads.num_heads,
        "num_kv_heads": workload.heads.num_kv_heads,
        "head_size": workload.heads.head_size,
        "dtype": dtype_name(workload.dtype),
        "kv_cache_dtype": workload.kv_cache_dtype,
        "shared_prefix_len": workload.shared_prefix_len,
        "window": workload.window,
        "returns_lse": workload.returns_lse,
        "own_output": workload.own_output,
        "head_size_v": _other_value_size(workload),
    }


def _other_value_size(workload: Workload) -> int | None:
    """Return the width of values where it is not that of keys."""
    heads = workload.heads
    return None if heads.value_size == heads.head_size else heads.value_size


def _workload_key(record: Cell | Skipped) -> tuple[object, ...]:
    names = ("phase", "label", "batch", "context", "query_len", "num_heads", "num_kv_heads")
    return tuple(getattr(record, name) for name in (*names, "head_size", "head_size_v", "dtype"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A whole run.

    Attributes:
        date: when it began, ISO 8601, UTC.
        machine, versions, settings, limits: where, with what, how, and beside what.
        cells: what was measured.
        skipped: what was asked for and not measured.
        schema_version: of this form.
    """

    date: str
    machine: Machine
    versions: Mapping[str, str]
    settings: Settings
    limits: Limits = Limits()
    cells: tuple[Cell, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def with_group(self, cells: tuple[Cell, ...], skipped: tuple[Skipped, ...]) -> Results:
        """Return the results with some more; a cell measured again replaces the older one."""
        new = {cell.identity for cell in cells}
        retried = {(_workload_key(entry), entry.backend) for entry in skipped}
        retried |= {(_workload_key(cell), cell.backend) for cell in cells}
        kept = tuple(cell for cell in self.cells if cell.identity not in new)
        older = tuple(
            entry for entry in self.skipped if (_workload_key(entry), entry.backend) not in retried
        )
        return replace(self, cells=(*kept, *cells), skipped=(*older, *skipped))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values, the schema version first."""
        record = asdict(self)
        return {"schema_version": record.pop("schema_version"), **record}

    def to_json(self) -> str:
        """Return the text of a file."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Results:
        """Return the results that `to_dict` gave.

        Raises:
            InvalidInputError: another schema version, a key is missing, or a value does not fit;
                names the place.
        """
        version = record.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InvalidInputError.for_argument(
                "schema_version", repr(version), f"{SCHEMA_VERSION}, which this release reads"
            )
        return from_record(cls, record, "results")


def read_results(path: Path) -> Results:
    """Read a file of results.

    Raises:
        InvalidInputError: it cannot be read, is not JSON, or is not of this form.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError.for_argument(
            "results file", f"{str(path)!r} ({error})", "a JSON file that can be read"
        ) from error
    if not isinstance(record, dict):
        raise InvalidInputError.for_argument(str(path), "no JSON object", "results of attn bench")
    try:
        return Results.from_dict(record)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error.message}", hint=error.hint) from error


def write_results(results: Results, path: Path) -> None:
    """Write a file whole or not at all: the older one stays until the new one is on the disk.

    Raises:
        OSError: it cannot be written; the older file is as it was.
    """
    text = results.to_json()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
