"""The page on adding a backend: its code is the example's, and what it names exists."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_conformance.stubs.modules import stub_vendor
from attn_conformance.stubs.suite import run_rules, stubbed_subject
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3
from attn_example_plugin.backend import ExampleEagerBackend
from attn_shared.device import preset

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "adding-a-backend.md"
EXAMPLE = ROOT / "packages" / "example-plugin"
SOURCES = (
    EXAMPLE / "pyproject.toml",
    EXAMPLE / "src/attn_example_plugin/backend.py",
    EXAMPLE / "src/attn_example_plugin/expected_failures.txt",
)


def blocks() -> Iterator[str]:
    """Yield the fenced blocks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    yield from re.findall(r"^```\w+\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", [block for block in blocks() if "stub_vendor" not in block])
def test_its_code_is_the_examples(block: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    # The page shows the bodies of methods, and a comment's line, without what stands before them.
    shown = [textwrap.indent(block, before) for before in ("", "    ", "        ", "#     ")]

    assert any(lines in text for lines in shown for text in texts)


def test_its_code_for_stubs_runs() -> None:
    (block,) = [block for block in blocks() if "stub_vendor" in block]
    # The example wraps no vendor, and serves no GPU: all cases are planned, and excluded.
    names = {
        "stub_vendor": stub_vendor,
        "FLASH_ATTN_3": FLASH_ATTN_3,
        "stubbed_subject": stubbed_subject,
        "YourBackend": ExampleEagerBackend,
        "preset": preset,
        "run_rules": run_rules,
    }
    exec(block, names)

    outcomes = names["outcomes"]
    assert isinstance(outcomes, list)
    assert {outcome.rule for outcome in outcomes} == {"window", "lse", "sinks"}
