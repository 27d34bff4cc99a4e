"""The pages of docs/benchmarks, one for each file of results, and the list of them.

python ci/generate_benchmarks.py             write the pages
python ci/generate_benchmarks.py --plots     draw the plots anew as well (needs matplotlib)
python ci/generate_benchmarks.py --check     fail where a page is not what would be written

Every JSON in that folder is what `attn bench --output` wrote. Needs attn-bench installed: `docs`
builds from the files, and the session `tests` checks them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from repository import ROOT

if TYPE_CHECKING:
    from attn_bench.results import Cell, Rate, Results

__all__ = ["main", "page", "pages", "stale"]

FOLDER = ROOT / "docs" / "benchmarks"
OTHER_FORMS = ("selection",)
"""Files that `attn bench` did not write: this one is of ci/measure_selection.py."""
COMMAND = "python ci/generate_benchmarks.py"
NOTICE = f"<!-- Written by `{COMMAND}` from the file of results. Do not edit. -->"
LISTED = re.compile(r"(?<=<!-- files -->\n).*?(?=<!-- end of files -->)", re.DOTALL)
PLOTS = (".svg", ".png")


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 if a page is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--plots", action="store_true", help="draw the plots anew")
    options = parser.parse_args(arguments)
    if options.check:
        problems = list(stale())
        print("\n".join(problems) or "the benchmark pages are current")
        return int(bool(problems))
    if options.plots:
        draw()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/benchmarks/{name}")
    return 0


def results() -> dict[str, Results]:
    """The results of docs/benchmarks by the stem of their file."""
    from attn_bench.results import read_results

    files = sorted(FOLDER.glob("*.json"))
    return {path.stem: read_results(path) for path in files if path.stem not in OTHER_FORMS}


def draw() -> None:
    """Draw each file's plots."""
    from attn_bench.plots import save_plot

    for stem, found in results().items():
        for suffix in PLOTS:
            save_plot(found, FOLDER / f"{stem}{suffix}")
            print(f"drew docs/benchmarks/{stem}{suffix}")


def pages() -> dict[str, str]:
    """The files of docs/benchmarks with their texts."""
    found = results()
    texts = {f"{stem}.md": page(stem, one) for stem, one in found.items()}
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    return texts | {"index.md": LISTED.sub(lambda _: table_of_files(found), index)}


def stale() -> Iterator[str]:
    """What in docs/benchmarks is not current, or is missing."""
    for name, text in pages().items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield f"docs/benchmarks/{name} is not current; run: {COMMAND}"
    for stem in results():
        for suffix in PLOTS:
            if not (FOLDER / f"{stem}{suffix}").is_file():
                yield f"docs/benchmarks/{stem}{suffix} is missing; run: {COMMAND} --plots"


def table_of_files(found: dict[str, Results]) -> str:
    """The files, with what was measured where and when."""
    rows = [
        (
            f"[{stem}]({stem}.md)",
            one.machine.name,
            ", ".join(dict.fromkeys(f"`{cell.backend}`" for cell in one.cells)),
            ", ".join(dict.fromkeys(f"`{cell.peer}`" for cell in one.cells if cell.peer)),
            f"torch {one.versions.get('torch', '?')}",
            one.date[:10],
            f"[JSON]({stem}.json)",
        )
        for stem, one in found.items()
    ]
    return table(("Page", "Machine", "Backends", "Peers", "With", "Date", "Data"), rows) + "\n"


def table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table, ending in a new line."""
    heads = list(names)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(stem: str, one: Results) -> str:
    """A file of results as a page."""
    parts = [
        NOTICE,
        f"# {one.machine.name}: {', '.join(dict.fromkeys(cell.backend for cell in one.cells))}",
        f"{how(one)} [All figures as JSON]({stem}.json).",
        "".join(f"- {note}\n" for note in notes(one)).rstrip(),
        f"![Time beside each peer, and share of the machine's limits]({stem}.svg)",
        "## Limits of the machine",
        "Medians over the run, with their 95% intervals.",
        table(("Limit", "Rate", "95%"), limits(one)).rstrip(),
    ]
    for title, cells in groups(one.cells).items():
        parts += [f"## {title}", cell_table(cells).rstrip(), host_table(cells).rstrip()]
    if one.skipped:
        parts += ["## Not measured", table(("Workload", "What", "Why"), skipped(one)).rstrip()]
    return "\n\n".join(part for part in parts if part) + "\n"


def how(one: Results) -> str:
    """Where, with what, when and how it was measured."""
    from attn_bench.tables import headline

    machine = one.machine
    threads = f"{machine.threads} threads of torch on the host"
    driver = "" if machine.driver is None else f", driver {machine.driver}"
    versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
    graph = "; calls replayed from graphs where that is allowed" if one.settings.graph else ""
    return (
        f"{headline(one)}: {one.settings.rounds} rounds, {threads}{driver}{graph}. "
        f"Versions: {versions}."
    )


def notes(one: Results) -> Iterable[str]:
    """What a reader must know."""
    return dict.fromkeys((*one.machine.notes, *(note for cell in one.cells for note in cell.notes)))


def limits(one: Results) -> Iterator[tuple[str, str, str]]:
    """Rows of the machine's limits."""
    from attn_bench.units import figures, flops

    def row(name: str, rate: Rate, words: Callable[[float], str]) -> tuple[str, str, str]:
        low, high = map(words, rate.interval)
        return (name, words(rate.median), f"{low} to {high}")

    if one.limits.read_gb_per_s is not None:
        read = one.limits.read_gb_per_s
        yield row("read of memory", read, lambda rate: f"{figures(rate)} GB/s")
    for dtype, rate in one.limits.matmul_tflop_per_s.items():
        yield row(f"matrix product, {dtype}", rate, flops)


def groups(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Cells by backend and layer."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        graph = ", from a graph" if cell.mode == "graph" else ""
        cache = "" if cell.kv_cache_dtype == "auto" else f", {cell.kv_cache_dtype} cache"
        title = f"{cell.backend}, heads {cell.heads}, {cell.dtype}{cache}{graph}"
        found.setdefault(title, []).append(cell)
    return found


def cell_table(cells: list[Cell]) -> str:
    """A row for each workload, a column for each peer."""
    peers = list(dict.fromkeys(cell.peer for cell in cells if cell.peer is not None))
    has_hosts = any(cell.host_us is not None for cell in cells)
    names = ["Workload", "Time", "95%", "Rate", "Of limit", *(["Host"] if has_hosts else [])]
    rows = [
        [name, *own_columns(own[0], has_hosts), *(beside(own, peer) for peer in peers)]
        for name, own in by_workload(cells).items()
    ]
    return table([*names, *(f"/ `{peer}`" for peer in peers)], rows)


def by_workload(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Cells by what a reader calls their workload."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(f"{cell.phase.replace('_', ' ')} {cell.label}", []).append(cell)
    return found


def host_table(cells: list[Cell]) -> str:
    """The host's work of a call and of a step, beside the peers'; "" where it was not measured."""
    measured = [cell for cell in cells if cell.plan_host_us is not None]
    peers = list(dict.fromkeys(cell.peer for cell in measured if cell.peer is not None))
    if not measured:
        return ""
    names = ["Workload", "A call", *(f"`{peer}`" for peer in peers)]
    names += ["`build`", "It waits", *(f"`{peer}` plans" for peer in peers)]
    rows = [[name, *host_columns(own, peers)] for name, own in by_workload(measured).items()]
    return f"The host's work, outside graphs:\n\n{table(names, rows)}"


def host_columns(cells: list[Cell], peers: Iterable[str]) -> Iterator[str]:
    """The host's time of a call, and of a step, ours and each peer's."""
    own, by_peer = cells[0], {cell.peer: cell for cell in cells}
    yield words_of(own.host_us)
    for peer in peers:
        yield words_of(by_peer[peer].peer_host_us if peer in by_peer else None)
    yield words_of(own.plan_host_us)
    yield {None: "", True: "yes", False: "no"}[own.plan_waits]
    for peer in peers:
        yield words_of(by_peer[peer].peer_plan_host_us if peer in by_peer else None)


def words_of(time_us: float | None) -> str:
    """A time, or nothing where there is none."""
    from attn_bench.units import duration

    return "" if time_us is None else duration(time_us)


def own_columns(cell: Cell, has_hosts: bool) -> list[str]:
    """A backend's own figures."""
    from attn_bench.tables import rate_words
    from attn_bench.units import duration, percent

    low, high = (duration(end) for end in cell.interval_us)
    share = percent(max(cell.share_of_read, cell.share_of_matmul))
    host = [] if not has_hosts else ["" if cell.host_us is None else duration(cell.host_us)]
    return [duration(cell.time_us), f"{low} to {high}", rate_words(cell), share, *host]


def beside(cells: Iterable[Cell], peer: str) -> str:
    """The ratio to a peer, and its interval."""
    from attn_bench.units import ratio_words

    for cell in cells:
        if cell.peer == peer and cell.ratio is not None and cell.ratio_interval is not None:
            low, high = map(ratio_words, cell.ratio_interval)
            return f"**{ratio_words(cell.ratio)}** ({low} to {high})"
    return ""


def skipped(one: Results) -> Iterator[tuple[str, str, str]]:
    """Rows of what was not measured."""
    for entry in one.skipped:
        shape = f"{entry.num_heads}/{entry.num_kv_heads}x{entry.head_size}"
        workload = f"{entry.phase} {entry.label} {shape} {entry.dtype}"
        yield (workload, f"`{entry.peer or entry.backend}`", f"{entry.status}: {entry.reason}")


if __name__ == "__main__":
    sys.exit(main())
