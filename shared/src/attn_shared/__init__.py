"""Contracts, selection and the exact reference of the attn project.

    import attn_shared

    platform = attn_shared.current_platform()
    platform.has_device_capability(9, 0)
    attn = attn_shared.Attention(num_heads=32, num_kv_heads=8, head_size=128)

The names below are those that most users need; each lives in a module of this package, which is
imported when its name is first used, so that `import attn_shared` costs nothing beside torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_shared.backend import AttentionBackend
    from attn_shared.backend_names import AttentionBackendEnum, register_backend
    from attn_shared.device import DeviceFacts, resolve_device
    from attn_shared.errors import AttnError
    from attn_shared.layer import Attention
    from attn_shared.metadata import CommonAttentionMetadata
    from attn_shared.mla import MLAAttention
    from attn_shared.request import AttentionRequest, AttentionType, window_of
    from attn_shared.selection import Policy, Selection
    from attn_shared.selector import current_platform, get_attn_backend, select

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionBackendEnum",
    "AttentionRequest",
    "AttentionType",
    "AttnError",
    "CommonAttentionMetadata",
    "DeviceFacts",
    "MLAAttention",
    "Policy",
    "Selection",
    "__version__",
    "current_platform",
    "get_attn_backend",
    "register_backend",
    "resolve_device",
    "select",
    "window_of",
]

__version__ = "0.1.0"

_HOMES = {
    "Attention": "layer",
    "AttentionBackend": "backend",
    "AttentionBackendEnum": "backend_names",
    "AttentionRequest": "request",
    "AttentionType": "request",
    "AttnError": "errors",
    "CommonAttentionMetadata": "metadata",
    "DeviceFacts": "device",
    "MLAAttention": "mla",
    "Policy": "selection",
    "Selection": "selection",
    "current_platform": "selector",
    "get_attn_backend": "selector",
    "register_backend": "backend_names",
    "resolve_device": "device",
    "select": "selector",
    "window_of": "request",
}


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'attn_shared' has no attribute {name!r}")
    return getattr(importlib.import_module(f"attn_shared.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
