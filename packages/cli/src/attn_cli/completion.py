"""What the shell completes: names that are found without importing torch."""

from __future__ import annotations

__all__ = ["complete_backend", "complete_device"]


def complete_device(incomplete: str) -> list[str]:
    """Return the presets that begin with what was typed."""
    from attn_shared.presets import DATASHEETS

    return [name for name in DATASHEETS if name.startswith(incomplete.lower())]


def complete_backend(incomplete: str) -> list[str]:
    """Return "auto" and the installed backends that begin with what was typed."""
    import importlib.metadata

    installed = {point.name for point in importlib.metadata.entry_points(group="attn.backends")}
    return [
        name for name in ("auto", *sorted(installed)) if name.lower().startswith(incomplete.lower())
    ]
