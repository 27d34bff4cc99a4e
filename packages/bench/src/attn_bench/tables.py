"""Results for a terminal: one table per layer and backend, what was skipped, what to know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attn_bench.results import Cell, Machine, Rate, Results, Skipped
from attn_bench.units import duration, figures, flops, percent, ratio_words
from attn_bench.workloads import Heads, Workload
from attn_shared.dtypes import dtype_name

__all__ = [
    "headline",
    "peer_table",
    "rate_words",
    "result_tables",
    "summary_lines",
    "workload_table",
]

_USUAL_DTYPE = torch.bfloat16


def result_tables(results: Results) -> Iterator[RenderableType]:
    """Return everything that a reader of the results should see."""
    yield Text(headline(results), style="bold")
    yield from _limits(results)
    for title, cells in _tables_of(results.cells):
        yield Text(f"\n{title}", style="bold")
        yield _cell_table(cells)
    if results.skipped:
        yield Text("\nNot measured", style="bold")
        yield from _skipped_lines(results.skipped)
    notes = dict.fromkeys(note for cell in results.cells for note in cell.notes)
    for note in (*results.machine.notes, *notes):
        yield Text.assemble(("note: ", "dim"), note)


def headline(results: Results) -> str:
    """Say in one line where, with what and when."""
    machine, versions = results.machine, results.versions
    units = "" if machine.compute_units is None else f", {machine.compute_units} {_noun(machine)}"
    memory = "" if machine.memory_bytes is None else f", {machine.memory_bytes / 2**30:.0f} GiB"
    return (
        f"{machine.name} ({machine.arch}{units}{memory}), attn {versions.get('attn', '?')}, "
        f"torch {versions.get('torch', '?')}, {results.date[:10]}, "
        f"{results.settings.cache_state} inputs"
    )


def _noun(machine: Machine) -> str:
    """Return what the vendor calls a compute unit."""
    if machine.isa or machine.arch in ("x86_64", "aarch64"):
        return "cores"
    return {"sm_": "SMs", "gfx": "CUs"}.get(machine.arch[:3], "Xe cores")


def _limits(results: Results) -> Iterator[Text]:
    limits = results.limits
    parts = [] if limits.read_gb_per_s is None else [f"read {_gigabytes(limits.read_gb_per_s)}"]
    parts += [
        f"{dtype} matrix product {flops(rate.median)} "
        f"[{flops(rate.interval[0])}, {flops(rate.interval[1])}]"
        for dtype, rate in limits.matmul_tflop_per_s.items()
    ]
    if parts:
        yield Text(f"limits in the same rounds: {'; '.join(parts)}", style="dim")


def _gigabytes(rate: Rate) -> str:
    low, high = rate.interval
    return f"{figures(rate.median)} [{figures(low)}, {figures(high)}] GB/s"


def _tables_of(cells: Iterable[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    def title(cell: Cell) -> str:
        cache = "" if cell.kv_cache_dtype == "auto" else f", {cell.kv_cache_dtype} cache"
        graph = ", graph" if cell.mode == "graph" else ""
        return f"{cell.backend}, {cell.heads}, {cell.dtype}{cache}{graph}"

    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(title(cell), []).append(cell)
    yield from groups.items()


def _cell_table(cells: list[Cell]) -> Table:
    """Return a row for each workload, and below it one for each peer."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    has_hosts = any(cell.host_us is not None for cell in cells)
    table.add_column("Workload", no_wrap=True)
    for name in ("Time, 95%", "Of limit, or ratio", *(["Host"] if has_hosts else [])):
        table.add_column(name, justify="right", no_wrap=True)
    shown: set[tuple[str, str]] = set()
    for cell in cells:
        workload = (cell.phase, cell.label)
        if workload not in shown:
            time = _time(cell.time_us, cell.interval_us)
            words = (f"{cell.phase} {cell.label}", time, _rate_of_limit(cell))
            host = [_host(cell.host_us, cell.time_us)] if has_hosts else []
            table.add_row(*map(Text, words), *host)
        shown.add(workload)
        if cell.peer is not None:
            host = [_host(cell.peer_host_us, cell.peer_time_us)] if has_hosts else []
            table.add_row(*_peer_row(cell), *host)
    return table


def _host(host_us: float | None, time_us: float | None) -> Text:
    """Return the host's time to issue a call, marked where it is longer than the device's."""
    if host_us is None:
        return Text("")
    is_longer = time_us is not None and host_us > time_us
    return Text(duration(host_us), style="yellow" if is_longer else "dim")


def _time(time_us: float, interval_us: tuple[float, float] | None) -> str:
    """Return "10.0 ms [4.94, 29.1]", the interval in the unit of the time."""
    words = duration(time_us)
    if interval_us is None:
        return words
    scale = {"us": 1.0, "ms": 1e3, "s": 1e6}[words.split()[1]]
    low, high = (figures(end / scale) for end in interval_us)
    return f"{words} [{low}, {high}]"


def rate_words(cell: Cell) -> str:
    """Return the rate that stands nearer to its limit: "12.3 GB/s", "450 GFLOP/s"."""
    if cell.share_of_read >= cell.share_of_matmul:
        return f"{figures(cell.gb_per_s)} GB/s"
    return flops(cell.tflop_per_s)


def _rate_of_limit(cell: Cell) -> str:
    """Return the rate against the limit that is nearer."""
    return f"{rate_words(cell)} {percent(max(cell.share_of_read, cell.share_of_matmul)):>4}"


def _peer_row(cell: Cell) -> tuple[Text, ...]:
    name = Text(f"  {cell.peer}", style="dim")
    if cell.ratio is None or cell.ratio_interval is None or cell.peer_time_us is None:
        return (name, Text(""), Text(""))
    low, high = cell.ratio_interval
    style = "green" if high < 1 else "red" if low > 1 else ""
    ratio = Text(ratio_words(cell.ratio), style=style)
    ratio.append(f" [{ratio_words(low)}, {ratio_words(high)}]", style="not bold default")
    time = Text(_time(cell.peer_time_us, cell.peer_interval_us), style="dim")
    return (name, time, ratio)


def _skipped_lines(skipped: Iterable[Skipped]) -> Iterator[RenderableType]:
    """Say what was skipped, and below it why: a column beside it would be a few words wide."""
    for entry in skipped:
        yield Text(f"{_workload_words(entry)}  {entry.peer or entry.backend}")
        yield Padding(Text.assemble((f"{entry.status}: ", "yellow"), entry.reason), (0, 0, 0, 4))


def _workload_words(entry: Skipped) -> str:
    shape = f"{entry.num_heads}/{entry.num_kv_heads}x{entry.head_size}"
    return f"{entry.phase} {entry.label} {shape} {entry.dtype}"


def summary_lines(results: Results) -> Iterator[str]:
    """Return a line per cell without any ornament: workload, time in us, peer, ratio."""
    for cell in results.cells:
        beside = "" if cell.peer is None or cell.ratio is None else f" {cell.peer} {cell.ratio:.3f}"
        yield (
            f"{cell.backend} {cell.phase} {cell.label} {cell.heads} {cell.dtype} "
            f"{cell.time_us:.1f}{beside}"
        )


def workload_table(sets: Iterable[tuple[str, tuple[Workload, ...]]]) -> Table:
    """Return the named sets and what is in each."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    table.add_column("Set", no_wrap=True)
    table.add_column("Workloads", overflow="fold", ratio=1)
    for name, workloads in sets:
        table.add_row(Text(name, style="bold"), Text(", ".join(map(_listed, workloads))))
    return table


def _listed(workload: Workload) -> str:
    """Return a workload's lengths, and of its layer what is not the usual: heads, dtype, cache."""
    layer = [] if workload.heads == Heads() else [str(workload.heads)]
    layer += [] if workload.dtype == _USUAL_DTYPE else [dtype_name(workload.dtype)]
    layer += [] if workload.kv_cache_dtype == "auto" else [f"{workload.kv_cache_dtype} cache"]
    return " ".join([f"{workload.phase} {workload.shape}", *layer])


def peer_table(peers: Iterable[tuple[str, str, str]]) -> Table:
    """Return the named peers: name, what it calls, and what it needs or that it is here."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    table.add_column("Peer", no_wrap=True)
    table.add_column("What is called", overflow="fold", ratio=2)
    table.add_column("Needs", overflow="fold", ratio=1)
    for name, description, needs in peers:
        table.add_row(Text(name, style="bold"), Text(description), Text(needs))
    return table
