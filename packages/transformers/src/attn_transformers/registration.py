"""Names under which transformers finds attn: "attn", and "attn:BACKEND" for each backend."""

from __future__ import annotations

from attn_shared.registry import DEFAULT_REGISTRY
from attn_shared.selection import Policy
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
    means or after a plugin was registered.

    Args:
        backend: what "attn" runs; "auto" overrides the environment, None leaves it to it.

    Returns:
        The names that are known now.

    Raises:
        UnknownNameError: nobody knows the backend, or nothing installed provides it.
        InvalidRequestError: an ATTN_* variable with a value that it cannot have.
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
    return (PREFIX, *map(implementation_name, names))


def _register(name: str, policy: Policy, settings: Settings) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from attn_transformers.attention import AttentionFunction
    from attn_transformers.masks import attention_mask

    AttentionInterface.register(name, AttentionFunction(policy=policy, is_checked=settings.checked))
    AttentionMaskInterface.register(name, attention_mask)
