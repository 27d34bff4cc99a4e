"""`python -m attn_conformance.twins`: run all broken twins, and fail if one survives."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from attn_conformance.twins.catalogue import MLA_TWINS, TWINS
from attn_conformance.twins.run import AnyTwin, Finding, Verdict, run_twins
from attn_shared.errors import AttnError

__all__ = ["main"]

_SHOWN = 90  # characters of what the suite said


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each twin and rule; return 1 if a twin is not caught."""
    parser = argparse.ArgumentParser(prog="python -m attn_conformance.twins", description=__doc__)
    parser.add_argument("--device", default="cpu", help="torch device to run on (cpu)")
    parser.add_argument("names", nargs="*", metavar="TWIN", help="only these twins")
    options = parser.parse_args(arguments)
    every: tuple[AnyTwin, ...] = (*TWINS, *MLA_TWINS)
    known = {twin.__name__: twin for twin in every}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no such twin: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    chosen = [known[name] for name in options.names] or every
    start = time.perf_counter()
    findings = []
    try:
        for finding in run_twins(chosen, options.device):
            findings.append(finding)
            _show(finding)
    except AttnError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    seconds = time.perf_counter() - start
    _write(f"{len(chosen)} twins on the rules they break: {_sum(findings)}, in {seconds:.1f} s")
    return int(any(item.verdict in (Verdict.SURVIVED, Verdict.MISTAKEN) for item in findings))


def _show(finding: Finding) -> None:
    words = " ".join(finding.words.split())
    shown = words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."
    place = f"[{finding.case}]" if finding.case else ""
    _write(f"{finding.twin:26} {finding.verdict:9} {finding.rule}{place} {shown}")


def _sum(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
