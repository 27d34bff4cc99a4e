"""The entry point in vLLM's group `vllm.general_plugins`."""

from __future__ import annotations

import logging

from attn_shared.selector import DEFAULT_SELECTOR
from attn_shared.settings import from_environ
from attn_vllm._vendor import engine
from attn_vllm.layers import VARIABLE, named
from attn_vllm.versions import interface_of

__all__ = ["OWN_NAME", "register"]

_LOG = logging.getLogger("vllm.attn")

OWN_NAME = "ATTN"
"""What attn's backends are called among vLLM's, where vLLM takes a new name (0.32 and later)."""


def register() -> None:
    """Let attn's backends run vLLM's layers, if `ATTN_VLLM_BACKEND` says so; safe to call again.

    On a CPU they take the place of CPU_ATTN, the one name that vLLM's CPU platform resolves. On a
    GPU they get a name of their own (CUSTOM with vLLM 0.25), for vLLM's option
    `attention_config.backend`.

    Raises:
        UnsupportedOptionError: vLLM's release is not one that the adapters are written for.
        UnknownNameError: there is no such backend.
    """
    settings = from_environ()
    if settings.vllm_backend is None:
        _LOG.info("attn-vllm is installed and off; %s=auto, or a backend's name, is on", VARIABLE)
        return
    interface = interface_of(engine.version())
    name = named(settings.vllm_backend)
    if name is not None:
        DEFAULT_SELECTOR.registry.load(name)  # before a model is loaded: is there such a backend?
    slot = engine.take_place(interface, OWN_NAME)
    _LOG.info("attn's backends (%s) run vLLM's layers as %s", settings.vllm_backend, slot)
