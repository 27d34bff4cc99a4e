"""Hold IPEX to the contract on the real library's CPU build, and keep the results in docs.

    nox -s ipex                   runs the suite and compares with what is kept
    nox -s ipex -- --update       keeps what it found: docs/backends/ipex.json and the table of the
                                  page beside it

Needs attn-cli, attn-conformance, attn-cpu, attn-xpu, torch 2.8 and intel-extension-for-pytorch 2.8.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections import Counter
from typing import Any

from repository import ROOT

__all__ = ["kept", "main", "page_with", "table"]

Record = dict[str, Any]

KEPT = ROOT / "docs" / "backends" / "ipex.json"
PAGE = KEPT.with_suffix(".md")
BEGIN, END = "<!-- of ci/record_ipex.py -->", "<!-- end -->"

# Rules by what they try, for the page; all others are "options, refusals and the rest".
GROUPS = {
    "cache writes and reads": (
        *("cache_update", "slot_minus_one", "block_zero", "far_blocks", "cache_unchanged"),
        *("padded_blocks", "page_tables", "freed_blocks", "block_sizes", "layouts"),
        *("unread_blocks", "unread_query_rows", "finite_tails", "cache_formats", "wide_table"),
    ),
    "decode, prefill and mixed batches": (
        *("causal", "extend", "non_causal", "window", "two_sided_window", "order", "drafts"),
        *("many_requests", "padded_requests", "keyless_rows", "queryless_requests"),
        *("empty_batch", "upper_bounds", "long_context", "cascade", "generated"),
    ),
    "encoders and cross-attention": ("encoder", "encoder_only", "cross_attention"),
    "logits, heads and dtypes": (
        *("scale", "softcap", "large_logits", "combinations", "gqa", "head_sizes"),
        *("dtypes", "ieee_float32"),
    ),
}
REST = "options, refusals and the rest"


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; 1 if a case failed, or fewer passed than are kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--update", action="store_true", help="keep the results in docs")
    parser.add_argument("--depth", default="full", help="quick or full")
    options = parser.parse_args(arguments)
    verify = ("-m", "attn_cli", "verify", "IPEX", "--device", "cpu", "--json")
    command = [sys.executable, *verify, "--depth", options.depth]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        print(done.stdout or "attn verify printed no report", file=sys.stderr)
        return 1
    if "total" not in report:
        print(done.stdout, file=sys.stderr)
        return 1
    for outcome in report["outcomes"]:
        if outcome["status"] not in ("passed", "excluded"):
            print(f"{outcome['rule']}[{outcome['case']}]: {outcome['message']}", file=sys.stderr)
    found = kept(report, datetime.datetime.now(datetime.UTC).date().isoformat())
    print(table(found))
    if options.update and report["ok"]:
        KEPT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    return 0 if report["ok"] and not fewer(found) else 1


def fewer(found: Record) -> list[str]:
    """Say which rules have fewer passed cases than are kept of the same depth."""
    if not KEPT.is_file():
        return []
    before: Record = json.loads(KEPT.read_text(encoding="utf-8"))
    if before["facts"]["depth"] != found["facts"]["depth"]:
        return []
    lines = [
        f"{rule}: {found['rules'].get(rule, {}).get('passed', 0)} passed, and {counts['passed']} "
        "are kept"
        for rule, counts in before["rules"].items()
        if found["rules"].get(rule, {}).get("passed", 0) < counts["passed"]
    ]
    for line in lines:
        print(line, file=sys.stderr)
    return lines


def kept(report: Record, date: str) -> Record:
    """What is kept of a report of the suite: where it ran, and how many cases of each rule."""
    counts: dict[str, Counter[str]] = {}
    for rule in report["rules"]:
        counts[rule["rule"]] = Counter(
            {name: rule[name] for name in ("passed", "failed", "excluded") if name in rule}
        )
    names = ("backend", "device", "torch", "python", "dtypes", "depth", "source", "suite")
    return {
        "date": date,
        "library": "intel-extension-for-pytorch 2.8.0+cpu",
        "facts": {name: report["facts"][name] for name in names},
        "total": report["total"],
        "rules": {name: dict(found) for name, found in counts.items()},
    }


def table(record: Record) -> str:
    """The results as a table by what the rules try."""
    rows: dict[str, Counter[str]] = {name: Counter() for name in (*GROUPS, REST)}
    for rule, counts in record["rules"].items():
        group = next((name for name, rules in GROUPS.items() if rule in rules), REST)
        rows[group].update(counts)
    facts, total = record["facts"], record["total"]
    where = f"torch {facts['torch']}, Python {facts['python']}, {facts['device']}"
    lines = [
        f"{record['library']}, {where}, {record['date']}, depth {facts['depth']}:",
        f"{total['passed']} of {total['run']} cases passed; {total['excluded']} are not served.",
        "",
        "| rules | passed | failed |",
        "|---|---|---|",
    ]
    for name, counts in rows.items():
        lines.append(f"| {name} | {counts['passed']} | {counts['failed']} |")
    return "\n".join(lines)


def page_with(page: str, record: Record) -> str:
    """The page with the table of a record in its place.

    Raises:
        ValueError: the page has no such place.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table(record)}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
