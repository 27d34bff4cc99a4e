from __future__ import annotations

from attn_cli.environment import settings_record
from attn_shared.settings import from_environ


def test_settings_are_shown_with_what_is_to_be_said_of_them() -> None:
    environ = {"ATTN_BACKEND": "TORCH_SDPA", "ATTN_CACHE_DIR": "/c", "ATTN_BAKEND": "x"}
    record = settings_record(from_environ(environ))
    notes = record.pop("notes")
    assert record == {"backend": "TORCH_SDPA", "cache_dir": "/c", "checked": False}
    assert any("ATTN_BAKEND is set and unknown" in note for note in notes)


def test_without_settings_nothing_is_said() -> None:
    assert settings_record(from_environ({})) == {
        "backend": None,
        "cache_dir": None,
        "checked": False,
        "notes": [],
    }
