"""What probes of vendor libraries share."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from attn_shared.probing import (
    build_flags,
    import_library,
    installed_version,
    optional_arguments,
    require,
)


def write_module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_module_that_ends_the_process_fails_to_import_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, "ends_the_process", "raise SystemExit(127)", monkeypatch)
    with pytest.raises(ImportError, match=r"ends_the_process ended the process .* status 127"):
        import_library("ends_the_process")


def test_what_an_import_raises_passes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, "no_driver", "raise OSError('libcudart.so.12')", monkeypatch)
    with pytest.raises(OSError, match=r"libcudart\.so\.12"):
        import_library("no_driver")


def test_a_missing_name_is_reported_with_the_place_and_the_hint() -> None:
    module = ModuleType("flash_attn")
    module.present = 3
    assert require(module, "present", "unused") == 3
    with pytest.raises(ImportError, match=r"flash_attn \(a namespace package\) has no absent: why"):
        require(module, "absent", "why")


def test_version_of_the_first_installed_distribution() -> None:
    assert installed_version(["no-such-distribution", "pytest"]) == pytest.__version__
    assert installed_version(["no-such-distribution"]) == "unknown"


def test_flags_are_sorted_text() -> None:
    flags = {"paged": False, "fp8": True, "archs": "sm_90", "tiles": 3}
    expected = (("archs", "sm_90"), ("fp8", "on"), ("paged", "off"), ("tiles", "3"))
    assert build_flags(flags) == expected


def test_arguments_are_found_behind_wrappers_and_nowhere_else() -> None:
    def plain(q: object, *, sinks: object = None) -> None: ...

    @functools.wraps(plain)
    def wrapper(*args: object, **kwargs: object) -> None: ...

    def hides(*args: object, **kwargs: object) -> None: ...

    calls = {"plain": plain, "wrapped": wrapper, "hides": hides, "absent": None, "c": max}
    found = optional_arguments(calls, ["sinks", "out"])
    assert found == {"plain.sinks", "wrapped.sinks"}
