"""`attn select --model` and `attn explain --model`: one selection for a whole model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attn_cli.environment import settings_record
from attn_cli.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from attn_cli.request_flags import RequestFlags
    from attn_shared.device import DeviceFacts
    from attn_shared.model_selection import ModelSelection
    from attn_shared.selection import Policy
    from attn_shared.settings import Settings

__all__ = ["model_record", "selection_for_model"]


def selection_for_model(
    flags: RequestFlags, path: str, device: DeviceFacts | None, policy: Policy
) -> ModelSelection:
    """Return the answer to a whole model.

    Raises:
        AttnError: the config cannot be read, or no backend serves one of its groups.
    """
    from attn_cli.model_flags import model_of
    from attn_shared.model_selection import select_model
    from attn_shared.selector import DEFAULT_SELECTOR

    resolve = partial(DEFAULT_SELECTOR.resolve, device=device, policy=policy)
    return select_model(model_of(flags, path), resolve)


def model_record(answer: ModelSelection, settings: Settings) -> dict[str, Any]:
    """Return the answer as JSON-safe values."""
    return {
        **answer.to_dict(),
        "schema_version": SCHEMA_VERSION,
        "settings": settings_record(settings),
    }
