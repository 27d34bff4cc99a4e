"""Where attn decides otherwise than vLLM 0.25.1 was recorded to, as a page of docs/.

python ci/generate_differences.py             write docs/selection-differences.md
python ci/generate_differences.py --check     fail where it is not what would be written

Fails on a difference that no rule explains, and on a rule that explains none. Needs every
distribution of the project installed, and the recorded rows (ATTN_ORACLE_DIR).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import chain

from compare_others import FILES, compare_others, other_rules
from compare_selection import compare_decisions, compare_forced
from differences import Difference, Explained, Rule, explain
from recorded import folder, rows
from repository import ROOT
from selection_rules import selection_rules

__all__ = ["main", "page", "problems", "report"]

PAGE = ROOT / "docs" / "selection-differences.md"
COMMAND = "python ci/generate_differences.py"
SELECTIONS = ("decisions", "forced")
PREFACE = f"""\
<!-- Written by `{COMMAND}` from recorded decisions. Do not edit. -->

# Where attn decides otherwise than vLLM 0.25.1

vLLM 0.25.1's own selector was run on made-up devices and its answers recorded. attn answers the
same questions, and every difference belongs to a rule below: a reason, and how it is known. A
difference without a rule, and a rule without a difference, fail the tests.

For each row, the reasons of every backend that both know and attn provides are compared; then the
choice, with the first in the recorded order that serves by attn's reasons; a recorded choice that
attn does not provide is told apart.
""".splitlines()
SHOWN = 12  # unexplained differences that are printed


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 if something is unexplained, unused or not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args(arguments).check
    if not folder().is_dir():
        print(f"no recorded decisions in {folder()} (ATTN_ORACLE_DIR)")
        return 1
    found, rules = report()
    told = list(problems(found, rules))
    text = page(found, rules)
    if is_check:
        present = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        if present != text:
            told.append(f"docs/{PAGE.name} is not current; run: {COMMAND}")
    elif not told:
        PAGE.write_text(text, encoding="utf-8")
    print("\n".join(told) or f"{sum(found.counts.values())} differences, all explained")
    return int(bool(told))


def report() -> tuple[Explained, list[Rule]]:
    """Compare every recorded row, and give each difference to a rule."""
    rules = [*selection_rules(), *other_rules()]
    every: Iterable[Difference] = chain(compare_decisions(), compare_forced(), compare_others())
    return explain(every, rules), rules


def problems(found: Explained, rules: Iterable[Rule]) -> Iterator[str]:
    """What is unexplained, and which rules explain nothing."""
    for difference in found.unexplained[:SHOWN]:
        yield f"unexplained: {difference.describe()}"
    if len(found.unexplained) > SHOWN:
        yield f"and {len(found.unexplained) - SHOWN} more"
    yield from (f"explains nothing: {name}" for name in found.unused(rules))


def page(found: Explained, rules: list[Rule]) -> str:
    """The page: what was compared, then a section per rule."""
    lines = [*PREFACE, "", *_compared(found), ""]
    groups = {
        "Other answers": [r for r in rules if not r.name.startswith("not provided")],
        "What attn does not provide": [r for r in rules if r.name.startswith("not provided")],
    }
    for title, members in groups.items():
        lines += [f"## {title}", "", *chain.from_iterable(_section(r, found) for r in members)]
    return "\n".join(lines).rstrip() + "\n"


def _compared(found: Explained) -> Iterator[str]:
    """The files, their rows, and how many rows differ."""
    yield "| recorded | rows | differences |"
    yield "|---|---|---|"
    for name in (*SELECTIONS, *FILES):
        yield f"| {name} | {len(rows(name)):,} | {found.by_file[name]:,} |"


def _section(rule: Rule, found: Explained) -> Iterator[str]:
    count = found.counts[rule.name]
    yield f"### {rule.name[0].upper()}{rule.name[1:]}"
    yield ""
    yield f"{rule.reason} Evidence: {rule.evidence}."
    yield ""
    example = found.examples.get(rule.name)
    place = "" if example is None else f", {_where(example)} for one"
    yield f"{count:,} difference{'' if count == 1 else 's'}{place}."
    yield ""


def _where(example: Difference) -> str:
    name = example.row.get("id")
    arch = example.row.get("arch")
    words = f"{example.file} {name}" if name else example.file
    return f"{words} on {arch}" if arch else words


if __name__ == "__main__":
    sys.exit(main())
