"""Where vLLM looks for the backend class; it is made when it is asked for (PEP 562)."""

from __future__ import annotations

from typing import Any

__all__ = ["AttnBackend"]  # noqa: F822


def __getattr__(name: str) -> Any:
    """Return the class, for the vLLM that is installed."""
    if name != "AttnBackend":
        raise AttributeError(f"module 'attn_vllm.adapters' has no attribute {name!r}")
    from attn_vllm._vendor.classes import backend_class

    return backend_class()
