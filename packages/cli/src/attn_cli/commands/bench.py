"""`attn bench`: backends beside peers and the machine's limits, in figures, a file and a plot."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attn_cli.completion import complete_backend
from attn_cli.exit_codes import FAILURES_FOUND, INTERRUPTED, USAGE
from attn_cli.failures import guarded
from attn_cli.installing import missing_package
from attn_cli.options import Panel
from attn_cli.output import OutputFlags, emit, warn
from attn_cli.progress import progress_bar
from attn_cli.schema import SCHEMA_VERSION
from attn_shared.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["BenchFlags", "bench"]

_what, _how, _results = Panel("What is measured"), Panel("How"), Panel("Results")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """What is measured, and how."""

    backend: Annotated[
        list[str] | None,
        _what.word(
            "--backend",
            "A backend to measure, or auto. May be given several times.",
            "NAME",
            autocompletion=complete_backend,
        ),
    ] = None
    peer: Annotated[
        list[str] | None,
        _what.word(
            "--peer",
            "Measure this beside each backend: a direct call (see --list-peers), another backend, "
            "or module:function. May be given several times.",
            "NAME",
        ),
    ] = None
    workload: Annotated[
        list[str] | None,
        _what.word(
            "--workload",
            "A named set of workloads; see --list-workloads. May be given several times. "
            "Default: quick.",
            "SET",
        ),
    ] = None
    trace: Annotated[
        list[str] | None,
        _what.word("--trace", "Steps of one's own. May be given several times.", "FILE"),
    ] = None
    list_workloads: Annotated[
        bool, _what.flag("--list-workloads", "Show the named sets and measure nothing.")
    ] = False
    list_peers: Annotated[
        bool,
        _what.flag("--list-peers", "Show the direct calls and what each needs; measure nothing."),
    ] = False
    heads: Annotated[
        list[str] | None,
        _what.word(
            "--heads",
            "Query heads / kv heads x head size. May be given several times. Default: the set's "
            "own, mostly 32/8x128.",
            "H/KxD",
        ),
    ] = None
    dtype: Annotated[
        list[str] | None,
        _what.word(
            "--dtype",
            "bfloat16, float16 or float32. May be given several times. Default: the set's own, "
            "bfloat16.",
            "DTYPE",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _what.word(
            "--kv-cache-dtype",
            "Format of the cache: auto, fp8, ... Default: the set's own, mostly auto.",
            "DTYPE",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        _what.integer("--block-size", "Tokens per block. Default: the set's own, mostly 16."),
    ] = None
    window: Annotated[
        int | None,
        _what.integer("--window", "Keys that a token sees, its own included. Default: all."),
    ] = None
    lse: Annotated[
        bool, _what.flag("--lse", "Each call also returns the logarithm of the denominators.")
    ] = False
    own_output: Annotated[
        bool,
        _what.flag("--own-output", "Each call returns its own tensor, and copies into no other."),
    ] = False
    device: Annotated[
        str | None,
        _what.word(
            "--device", "A torch device of this machine. Default: the first that is found.", "NAME"
        ),
    ] = None

    rounds: Annotated[
        int, _how.integer("--rounds", "Rounds; each measures every contender once.")
    ] = 15
    budget: Annotated[
        float | None,
        _how.number("--budget", "End after about so long, with fewer rounds per cell.", "SECONDS"),
    ] = None
    cold: Annotated[
        bool,
        _how.flag("--cold/--warm", "Inputs are in no cache, or just used by the same call."),
    ] = True
    graph: Annotated[
        bool,
        _how.flag("--graph", "Replay decode from CUDA graphs where the backend allows it."),
    ] = False

    plot: Annotated[
        list[str] | None,
        _results.word("--plot", "Draw the results. May be given several times.", "FILE.png|svg"),
    ] = None
    resume: Annotated[
        bool, _results.flag("--resume", "Keep what the file of --output holds, and go on.")
    ] = False
    note: Annotated[
        list[str] | None,
        _results.word("--note", "Keep this with the results. May be given several times.", "TEXT"),
    ] = None


def bench(flags: BenchFlags, output: OutputFlags) -> int:
    """Measure backends beside peers and the machine's limits.

    Every round measures each contender once, in changing order. The file named by --output is
    written after each cell, so that an interruption loses nothing that was finished.
    """
    # The file is the results' own: no record of an error may take its place.
    return guarded(lambda: _bench(flags, output), replace(output, output=None))


def _bench(flags: BenchFlags, output: OutputFlags) -> int:
    try:
        import attn_bench.run as runner
    except ModuleNotFoundError as error:
        raise missing_package("bench", error) from error
    from attn_bench.planning import make_plan

    if flags.list_workloads:
        return _list_workloads(output)
    if flags.list_peers:
        return _list_peers(output)
    gc.enable()  # off for short commands; this one runs long and makes garbage
    plan = make_plan(_asked(flags, output))
    plots = [_checked_plot(path) for path in flags.plot or ()]
    path = None if output.output is None else Path(output.output)
    earlier = _earlier(path) if flags.resume else None
    with progress_bar(output) as progress:
        outcome = runner.run(plan, output=path, resume_from=earlier, progress=progress)
    _show(outcome.results, output)
    _draw(outcome.results, plots, output)
    return _exit_code(outcome, path)


def _list_workloads(output: OutputFlags) -> int:
    from attn_bench.sets import SETS
    from attn_bench.tables import workload_table

    sets = {name: [workload.listed() for workload in workloads] for name, workloads in SETS.items()}
    emit(
        {"schema_version": SCHEMA_VERSION, "workload_sets": sets},
        output,
        tables=lambda: [workload_table(SETS.items())],
        bare=SETS,
    )
    return 0


def _list_peers(output: OutputFlags) -> int:
    from attn_bench.peers import known_peers
    from attn_bench.tables import peer_table

    peers = known_peers()
    emit(
        {
            "schema_version": SCHEMA_VERSION,
            "peers": [
                {"name": name, "calls": words, "needs": needs} for name, words, needs in peers
            ],
        },
        output,
        tables=lambda: [peer_table(peers)],
        bare=[name for name, _, _ in peers],
    )
    return 0


def _asked(flags: BenchFlags, output: OutputFlags) -> Any:
    """Return the flags in attn-bench's own words, after those of the environment."""
    from attn_bench.planning import Asked
    from attn_bench.results import Settings
    from attn_shared.settings import from_environ

    settings = from_environ()
    warn((f"note: {note}" for note in settings.notes()), output)
    named = [settings.backend] if settings.backend is not None else []
    return Asked(
        backends=flags.backend or named,
        peers=flags.peer or (),
        workloads=flags.workload or (),
        traces=[Path(name) for name in flags.trace or ()],
        heads=flags.heads or (),
        dtypes=flags.dtype or (),
        kv_cache_dtype=flags.kv_cache_dtype,
        block_size=flags.block_size,
        window=flags.window,
        returns_lse=flags.lse,
        own_output=flags.own_output,
        device=flags.device,
        settings=Settings(
            rounds=flags.rounds,
            cache_state="cold" if flags.cold else "warm",
            graph=flags.graph,
        ),
        seconds=flags.budget,
        notes=flags.note or (),
    )


def _checked_plot(name: str) -> Path:
    from attn_bench.plots import check_plot_path

    path = Path(name)
    check_plot_path(path)
    return path


def _earlier(path: Path | None) -> Any:
    from attn_bench.results import read_results

    if path is None:
        raise InvalidInputError.for_argument("--resume", "without a file", "with --output FILE")
    return read_results(path) if path.exists() else None


def _show(results: Any, output: OutputFlags) -> None:
    from attn_bench.tables import summary_lines

    def tables() -> Iterable[RenderableType]:
        from attn_bench.tables import result_tables

        return result_tables(results)

    shown = replace(output, output=None)  # the file was written as the run went
    emit(results.to_dict(), shown, tables=tables, bare=summary_lines(results))


def _draw(results: Any, plots: Iterable[Path], output: OutputFlags) -> None:
    from attn_bench.plots import save_plot

    for path in plots:
        if results.cells:
            save_plot(results, path)
        else:
            warn([f"{path} was not drawn: nothing was measured"], output)


def _exit_code(outcome: Any, path: Path | None) -> int:
    """Say what was lost, if anything, and return the code of the worst that happened."""
    from attn_bench.results import SkippedStatus

    cells, skipped = outcome.results.cells, outcome.results.skipped
    if outcome.write_error is not None:
        sys.stderr.write(
            f"Error: {path} could not be written ({outcome.write_error}); it holds what was "
            "finished before, and the results are above.\n"
        )
        return USAGE
    if outcome.is_interrupted:
        kept = f"kept in {path}; --resume goes on" if path else "shown above"
        sys.stderr.write(f"{len(cells)} finished cells are {kept}\n")
        return INTERRUPTED
    if any(entry.status in (SkippedStatus.WRONG, SkippedStatus.FAILED) for entry in skipped):
        return FAILURES_FOUND
    if cells or not skipped:
        return 0
    return int(next((entry.exit_code for entry in skipped if entry.exit_code), 0))
