"""Put a run of the conformance suite on record, for the support matrix.

attn verify TORCH_SDPA --device cuda --json > report.json     on the hardware
python ci/record_run.py report.json --record "WHERE IT IS KEPT, OR WHAT REPEATS IT"

A run takes the place of an earlier one of the same backend, hardware and depth. Then run
`python ci/generate_matrix.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

from repository import ROOT

__all__ = ["main"]

RUNS = ROOT / "packages/cli/src/attn_cli/matrix/hardware_runs.json"


def main(arguments: list[str] | None = None, *, runs: Path = RUNS) -> int:
    """Add the run; 2 if the report is not of a run that passed."""
    from attn_cli.matrix.hardware_runs import HardwareRun, known_runs, runs_text, with_run
    from attn_shared.errors import InvalidInputError

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("report", type=Path, help="what attn verify --json printed")
    parser.add_argument("--record", required=True, help="where it is kept, or what repeats it")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser.add_argument("--date", default=today, help="day of the run; today by default")
    options = parser.parse_args(arguments)
    try:
        report = json.loads(options.report.read_text(encoding="utf-8"))
        run = HardwareRun.from_report(report, date=options.date, record=options.record)
        known = known_runs(runs.read_text(encoding="utf-8"))
    except (InvalidInputError, OSError, ValueError) as error:
        print(f"{options.report}: {error}", file=sys.stderr)
        return 2
    runs.write_text(runs_text(with_run(known, run)), encoding="utf-8")
    print(f"{run.backend} on {run.device} ({run.arch}), {run.date}: {run.what}, {run.counts()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
