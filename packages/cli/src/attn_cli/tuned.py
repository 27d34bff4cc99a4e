"""Tables that `attn tune` wrote for this machine, and what they say about a request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_shared.errors import InvalidInputError

if TYPE_CHECKING:
    from attn_shared.device import DeviceFacts
    from attn_shared.request import AttentionRequest
    from attn_shared.selection import Policy
    from attn_shared.settings import Settings

__all__ = ["known_libraries", "measured_policy", "table_path", "torch_device"]


def table_path(device: DeviceFacts, settings: Settings) -> Path:
    """Return where the table of a device of this machine is: in ATTN_CACHE_DIR, or the user's."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{device.name} {device.arch}".lower()).strip("-")
    return _cache_folder(settings) / "tuned" / f"{name}.json"


def _cache_folder(settings: Settings) -> Path:
    if settings.cache_dir is not None:
        return settings.cache_dir
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError:  # it comes with attn-bench, without which there is no table
        return Path.home() / ".cache" / "attn"
    return user_cache_path("attn")


def torch_device(device: DeviceFacts) -> Any:
    """Return the torch device of a device of this machine."""
    import torch

    return torch.device(device.torch_device_type, device.index or 0)


def known_libraries(device: DeviceFacts) -> dict[str, str]:
    """Return the versions of the vendor libraries that are installed for a device."""
    from attn_shared.selector import DEFAULT_SELECTOR

    entries = DEFAULT_SELECTOR.inventory(device).entries
    return {entry.name: entry.version for entry in entries if entry.version is not None}


def measured_policy(
    policy: Policy, device: DeviceFacts, settings: Settings
) -> Callable[[AttentionRequest], Policy]:
    """Return how a policy goes on for each request: with what was measured on this very device.

    A table of another device or other versions is left aside, and the answer says why.
    """
    path = table_path(device, settings)
    if device.is_simulated or not path.is_file():
        return lambda request: policy
    try:
        from attn_bench.results import read_results
        from attn_bench.tuned import measured_order, mismatch
    except ModuleNotFoundError as error:
        aside = _aside(policy, path, f"{error.name} is not installed")
        return lambda request: aside
    try:
        results = read_results(path)
    except InvalidInputError as error:
        aside = _aside(policy, path, error.message)
        return lambda request: aside
    why = mismatch(results, torch_device(device), known_libraries(device))
    if why:
        aside = _aside(policy, path, why)
        return lambda request: aside

    def measured(request: AttentionRequest) -> Policy:
        order = measured_order(results, request)
        if not order:
            return policy
        remark = f"measured by attn tune on {results.date[:10]}: {', '.join(order)} ({path})"
        return replace(policy, measured=order, remarks=(*policy.remarks, remark))

    return measured


def _aside(policy: Policy, path: Path, why: str) -> Policy:
    remark = f"the table of attn tune is left aside ({path}): {why}"
    return replace(policy, remarks=(*policy.remarks, remark))
