"""The environment's settings as part of every answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_shared.settings import Settings

__all__ = ["settings_record"]


def settings_record(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON-safe values, with what is to be said about them."""
    return {
        "backend": settings.backend,
        "cache_dir": None if settings.cache_dir is None else str(settings.cache_dir),
        "checked": settings.checked,
        "notes": list(settings.notes()),
    }
