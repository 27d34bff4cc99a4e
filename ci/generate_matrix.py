"""The support matrix of the project's own backends, as pages of docs/.

python ci/generate_matrix.py             write docs/support-matrix.md, .html and .json
python ci/generate_matrix.py --check     fail where they are not what would be written

Needs every distribution of the project installed: `docs` builds from the files, and the session
`tests` checks them.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator

from repository import ROOT

__all__ = ["main", "pages", "stale"]

DOCS = ROOT / "docs"
COMMAND = "python ci/generate_matrix.py"
PREFACE = f"""\
<!-- Written by `{COMMAND}` from the capabilities. Do not edit. -->

The same [as one page](support-matrix.html), with the reason behind each cell, and \
[as JSON](support-matrix.json)."""


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 if a file is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args(arguments).check:
        differences = list(stale())
        print("\n".join(differences) or "the support matrix is current")
        return int(bool(differences))
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


def pages() -> dict[str, str]:
    """The files of docs/ with their texts."""
    from attn_cli.matrix.hardware_runs import known_runs
    from attn_cli.matrix.html_page import html_page
    from attn_cli.matrix.markdown import markdown_page
    from attn_cli.matrix.record import matrix_record
    from attn_cli.matrix.survey import AskedDevice, own_backends, survey
    from attn_shared.selector import Selector

    selector = Selector()
    matrix = survey(
        selector,
        devices=AskedDevice.presets(),
        backends=own_backends(selector.registry),
        runs=known_runs(),
    )
    return {
        "support-matrix.md": markdown_page(matrix, preface=PREFACE),
        "support-matrix.html": html_page(matrix),
        "support-matrix.json": json.dumps(matrix_record(matrix), indent=1) + "\n",
    }


def stale() -> Iterator[str]:
    """What in docs/ is not current, one description per file."""
    for name, text in pages().items():
        path = DOCS / name
        present = path.read_text(encoding="utf-8") if path.is_file() else ""
        if present != text:
            changed = difflib.unified_diff(
                present.splitlines(), text.splitlines(), "present", "current", lineterm="", n=0
            )
            shown = [line[:160] for line in list(changed)[:12]]
            yield "\n".join([f"docs/{name} is not current; run: {COMMAND}", *shown])


if __name__ == "__main__":
    sys.exit(main())
