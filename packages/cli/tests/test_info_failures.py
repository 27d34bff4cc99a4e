"""What counts as a failure for `attn info --probe`."""

from __future__ import annotations

from typing import Any

import pytest

from attn_cli.commands.info import _has_failures


def record(*, available: bool, status: str, failures: list[Any] | None = None) -> dict[str, Any]:
    platform = {"available": available, "vendor_libraries": [{"status": status}]}
    return {"platforms": [platform], "failures": failures or []}


@pytest.mark.parametrize(
    ("found", "is_failure"),
    [
        (record(available=True, status="broken"), True),
        (record(available=False, status="broken"), False),
        (record(available=True, status="absent"), False),
        (record(available=False, status="loaded", failures=[{"error": "x"}]), True),
    ],
)
def test_only_what_this_machine_could_use(found: dict[str, Any], is_failure: bool) -> None:
    assert _has_failures(found) is is_failure
