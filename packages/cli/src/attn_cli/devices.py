"""The device that `--device` names: one of this machine's, a preset, or any of an architecture."""

from __future__ import annotations

import re

import torch

from attn_shared.arch import ARCH_FORMS
from attn_shared.device import PRESETS, DeviceFacts, resolve_device
from attn_shared.errors import UnknownNameError
from attn_shared.selector import Selector

__all__ = ["named_device"]


def named_device(text: str, selector: Selector) -> DeviceFacts:
    """Return the facts of the device that a user named.

    Args:
        text: "cpu", "cuda:0", "xpu" (a device of this machine), a preset, or an architecture.
        selector: who knows this machine.

    Raises:
        UnknownNameError: it is none of these; the message lists the presets.
        NoBackendError: this machine has no such device; says why.
        InvalidInputError: this machine has fewer such devices.
    """
    types = sorted({p.torch_device_type for p in selector.registry.platforms().values()})
    here = re.fullmatch(rf"({'|'.join(types)})(?::(\d{{1,2}}))?", text) if types else None
    if here is not None:
        return selector.device_facts(torch.device(here[1], int(here[2] or 0)))
    try:
        return resolve_device(text)
    except UnknownNameError as error:
        raise _unknown(text, types) from error


def _unknown(text: str, types: list[str]) -> UnknownNameError:
    hint = UnknownNameError.for_name("device", text, [*PRESETS, *types]).hint
    return UnknownNameError(
        f"unknown device {text!r}; allowed: a preset ({', '.join(sorted(PRESETS))}), an "
        f"architecture ({', '.join(ARCH_FORMS)}), or a device of this machine (types "
        f"{', '.join(types)}; with a number: cuda:0).",
        hint=hint,
    )
