"""Names under which transformers finds attn: "attn", and "attn:BACKEND" for each backend."""

from __future__ import annotations

from contextlib import suppress

import torch

from attn_shared.errors import AttnError
from attn_shared.registry import DEFAULT_REGISTRY
from attn_shared.request import AttentionRequest
from attn_shared.selection import Policy
from attn_shared.selector import DEFAULT_SELECTOR
from attn_shared.settings import Settings, from_environ

__all__ = ["implementation_name", "register"]

PREFIX = "attn"


def implementation_name(backend: str | None = None) -> str:
    """Return the `attn_implementation` that runs a named backend; None: the selector's choice."""
    return PREFIX if backend in (None, "auto") else f"{PREFIX}:{backend}"


def register(backend: str | None = None) -> tuple[str, ...]:
    """Make attn's attention and mask functions known to transformers.

        attn_transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attn")

    "attn" lets the selector choose, or takes `backend`, or ATTN_BACKEND from the environment;
    "attn:TORCH_SDPA" takes the backend of that name. It may be called again, to change what "attn"
    means or after a plugin was registered. Platforms are imported here, and where torch has no
    accelerator also the backend for the host, so that the first token does not wait for them.

    Args:
        backend: what "attn" runs; "auto" overrides the environment, None leaves it to it.

    Returns:
        The names that are known now.

    Raises:
        UnknownNameError: nobody knows the backend, or nothing installed provides it.
        InvalidRequestError: an ATTN_* variable with a value that it cannot have.
        DuplicateNameError: two distributions bring a platform of one name.
    """
    settings = from_environ()
    names = DEFAULT_REGISTRY.names()
    default = settings.policy(backend)
    if default.backend is not None:
        DEFAULT_REGISTRY.get(default.backend)  # raises for a name that nothing provides
    _register(PREFIX, default, settings)
    for name in names:
        source = f"attn_implementation {implementation_name(name)}"
        _register(implementation_name(name), Policy(backend=name, source=source), settings)
    _load_for_host(default)
    return (PREFIX, *map(implementation_name, names))


def _load_for_host(policy: Policy) -> None:
    """Do now what the first layer on this host would have to wait for."""
    DEFAULT_REGISTRY.platforms()
    if torch.accelerator.is_available():
        return  # which device it will be is not known yet
    request = AttentionRequest(num_heads=1, num_kv_heads=1, head_size=64, dtype=torch.float32)
    with suppress(AttnError):  # a layer that meets it raises it, with its own request's reasons
        host = DEFAULT_SELECTOR.device_facts(torch.device("cpu"))
        DEFAULT_SELECTOR.resolve(request, host, policy)


def _register(name: str, policy: Policy, settings: Settings) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from attn_transformers.attention import AttentionFunction
    from attn_transformers.masks import attention_mask

    AttentionInterface.register(name, AttentionFunction(policy=policy, is_checked=settings.checked))
    AttentionMaskInterface.register(name, attention_mask)
