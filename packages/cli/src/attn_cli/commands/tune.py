"""`attn tune`: measure which backend is fastest on this very device, for later selections."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attn_cli.exit_codes import FAILURES_FOUND, INTERRUPTED
from attn_cli.installing import missing_package
from attn_cli.options import Panel
from attn_cli.output import OutputFlags, emit, warn
from attn_cli.progress import progress_bar
from attn_cli.schema import SCHEMA_VERSION
from attn_shared.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attn_shared.device import DeviceFacts
    from attn_shared.request import AttentionRequest

__all__ = ["TuneFlags", "tune"]

_what, _how = Panel("Which layers"), Panel("How")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFlags:
    """Which layers are measured, where and for how long."""

    device: Annotated[
        str | None,
        _what.word("--device", "A torch device of this machine. Default: the first.", "NAME"),
    ] = None
    heads: Annotated[
        list[str] | None,
        _what.word(
            "--heads",
            "Query heads / kv heads x head size, per rank. May be given several times. Default: "
            "32/8x128.",
            "H/KxD",
        ),
    ] = None
    dtype: Annotated[
        list[str] | None,
        _what.word("--dtype", "May be given several times. Default: bfloat16.", "DTYPE"),
    ] = None
    kv_cache_dtype: Annotated[
        str, _what.word("--kv-cache-dtype", "Format of the cache: auto, fp8, ...", "DTYPE")
    ] = "auto"
    window: Annotated[
        int | None,
        _what.integer("--window", "Keys that a token sees, its own included. Default: all."),
    ] = None
    budget: Annotated[
        float,
        _how.number("--budget", "End after about so long, with fewer rounds.", "SECONDS"),
    ] = 120.0
    rounds: Annotated[
        int, _how.integer("--rounds", "Rounds; each measures every backend once.")
    ] = 7


def tune(flags: TuneFlags, output: OutputFlags) -> int:
    """Measure which backend is fastest on this device, and let `attn select` decide by it.

    The table is kept in ATTN_CACHE_DIR or the user's cache folder. It counts for this device, this
    driver and these versions only, and only for what was measured.
    """
    try:
        import attn_bench.run as runner
    except ModuleNotFoundError as error:
        raise missing_package("tune", error) from error
    from attn_cli.tuned import table_path, torch_device
    from attn_shared.settings import from_environ

    if not flags.budget > 0:
        raise InvalidInputError.for_argument("--budget", flags.budget, "a number > 0")
    gc.enable()  # off for short commands; this one runs long and makes garbage
    device = _device(flags)
    path = table_path(device, from_environ())
    plan, requests = _plan(flags, device)
    earlier = _earlier(path, plan, torch_device(device), device, output)
    others = None if earlier is None else _without(earlier, plan.workloads)
    _make_folder(path)
    with progress_bar(output) as progress:
        outcome = runner.run(plan, output=path, resume_from=others, progress=progress)
    if earlier is not None and outcome.write_error is None:
        _keep_unmeasured(earlier, outcome.results, path)
    return _report(outcome, requests, path, output)


def _device(flags: TuneFlags) -> DeviceFacts:
    from attn_cli.devices import named_device
    from attn_shared.selector import DEFAULT_SELECTOR

    if flags.device is None:
        return DEFAULT_SELECTOR.current_platform().device()
    device = named_device(flags.device, DEFAULT_SELECTOR)
    if device.is_simulated:
        raise InvalidInputError.for_argument(
            "--device", repr(flags.device), "a device of this machine: cpu, cuda:0, xpu:0"
        )
    return device


def _plan(flags: TuneFlags, device: DeviceFacts) -> tuple[Any, list[AttentionRequest]]:
    """Return the run, and what each of the layers asks."""
    from attn_bench.results import Settings
    from attn_bench.tuned import tuning_plan, tuning_workloads
    from attn_bench.workloads import Heads
    from attn_cli.tuned import torch_device
    from attn_shared.dtypes import parse_dtype, parse_kv_cache_dtype

    here = torch_device(device)
    cache = parse_kv_cache_dtype(flags.kv_cache_dtype)
    layers = list(product(flags.heads or ["32/8x128"], flags.dtype or ["bfloat16"]))
    workloads = [
        workload
        for heads, dtype in layers
        for workload in tuning_workloads(
            Heads.parse(heads),
            parse_dtype(dtype),
            here,
            kv_cache_dtype=cache,
            window=flags.window,
        )
    ]
    requests = list(dict.fromkeys(map(_request, workloads)))
    names = [name for request in requests for name in _serving(request, device)]
    settings = Settings(rounds=flags.rounds)
    plan = tuning_plan(workloads, names, here, settings=settings, seconds=flags.budget)
    return plan, requests


def _request(workload: Any) -> AttentionRequest:
    from attn_shared.request import AttentionRequest, window_of

    heads = workload.heads
    return AttentionRequest(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        dtype=workload.dtype,
        kv_cache_dtype=workload.kv_cache_dtype,
        window=window_of(workload.window),
    )


def _serving(request: AttentionRequest, device: DeviceFacts) -> list[str]:
    """Return the backends that "auto" would choose among."""
    from attn_shared.selection import VerdictStatus
    from attn_shared.selector import DEFAULT_SELECTOR

    usable = (VerdictStatus.CHOSEN, VerdictStatus.ELIGIBLE, VerdictStatus.UNKNOWN)
    verdicts = DEFAULT_SELECTOR.resolve(request, device).verdicts
    return [v.name for v in verdicts if v.status in usable and v.priority is not None]


def _earlier(
    path: Path, plan: Any, here: Any, device: DeviceFacts, output: OutputFlags
) -> Any | None:
    """Return the older table; nothing where it is of another machine or measured otherwise."""
    from attn_bench.results import read_results
    from attn_bench.tuned import mismatch
    from attn_cli.tuned import known_libraries

    if not path.is_file():
        return None
    try:
        found = read_results(path)
    except InvalidInputError as error:
        warn([f"the older table is replaced: {error.message}"], output)
        return None
    why = mismatch(found, here, known_libraries(device))
    if why or found.settings != plan.settings:
        warn([f"the older table is replaced: {why or 'it was measured otherwise'}"], output)
        return None
    return found


def _without(found: Any, workloads: Iterable[Any]) -> Any:
    """Return results without what they say of some workloads, which are measured again."""
    from attn_bench.results import shape_fields

    again = [shape_fields(workload) for workload in workloads]

    def is_measured_again(record: Any) -> bool:
        return any(all(getattr(record, k) == v for k, v in shape.items()) for shape in again)

    return replace(
        found,
        cells=tuple(cell for cell in found.cells if not is_measured_again(cell)),
        skipped=tuple(entry for entry in found.skipped if not is_measured_again(entry)),
    )


def _keep_unmeasured(earlier: Any, results: Any, path: Path) -> None:
    """Put cells of the older table back whose turn did not come in a run that ended early."""
    from attn_bench.results import SkippedStatus, write_results

    names = ("backend", "phase", "label", "num_heads", "num_kv_heads", "head_size", "dtype")

    def key(record: Any, peer: str | None) -> tuple[Any, ...]:
        return (peer, record.window, record.kv_cache_dtype, *(getattr(record, n) for n in names))

    measured = {cell.identity for cell in results.cells}
    tried = {key(s, s.peer) for s in results.skipped if s.status is not SkippedStatus.BUDGET}
    kept = tuple(
        cell
        for cell in earlier.cells
        if cell.identity not in measured and not {key(cell, None), key(cell, cell.peer)} & tried
    )
    if kept:
        write_results(replace(results, cells=(*kept, *results.cells)), path)


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError.for_argument(
            "ATTN_CACHE_DIR", f"{str(path.parent)!r} ({error.strerror})", "a folder to write into"
        ) from error


def _report(
    outcome: Any, requests: Iterable[AttentionRequest], path: Path, output: OutputFlags
) -> int:
    orders = list(_orders(outcome.results, requests))
    record = {"schema_version": SCHEMA_VERSION, "table": str(path), "orders": orders}
    bare = [f"{row['layer']} {row['phase']}: {' '.join(row['relative_times'])}" for row in orders]
    emit(record, output, tables=lambda: _tables(record), bare=bare)
    if outcome.write_error is not None:
        raise InvalidInputError.for_argument(
            "table", f"{str(path)!r} ({outcome.write_error.strerror})", "a file that can be written"
        )
    if outcome.is_interrupted:
        return INTERRUPTED
    return 0 if all(row["relative_times"] for row in orders) else FAILURES_FOUND


def _orders(results: Any, requests: Iterable[AttentionRequest]) -> Iterator[dict[str, Any]]:
    from attn_bench.tuned import relative_times
    from attn_shared.dtypes import dtype_name
    from attn_shared.request import Phase

    for request, phase in product(requests, Phase):
        heads = f"{request.num_heads}/{request.num_kv_heads}x{request.head_size}"
        yield {
            "layer": f"{heads} {dtype_name(request.dtype)}",
            "request": request.to_dict(),
            "phase": str(phase),
            "relative_times": relative_times(results, request.with_options(phase=phase)),
        }


def _tables(record: dict[str, Any]) -> Iterable[RenderableType]:
    from rich.text import Text

    from attn_cli.views.layout import column_table

    rows = [
        (
            row["layer"],
            row["phase"],
            ", ".join(f"{name} {time:.2f}" for name, time in row["relative_times"].items())
            or "not measured: no backend ran at every point",
        )
        for row in record["orders"]
    ]
    yield column_table(("Layer", "Phase", "Time over the fastest's"), rows)
    yield Text(f"\nkept in {record['table']}", style="dim")
