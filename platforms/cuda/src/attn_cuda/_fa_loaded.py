"""For which devices this process has loaded FlashAttention, and from what.

A layer is built from its description alone, which names no device; which libraries are loaded is
a fact of the process, as sys.modules is. `FlashAttnBackend.load_vendor` notes it here, and a
layer's constructor resolves its provider from it by the function that selection has used.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_cuda._fa_capability import NAME, capability_on
from attn_cuda._fa_providers import Provider, libraries_for, resolve_provider
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import UnsupportedOptionError, VendorMissingError
from attn_shared.inventory import Inventory
from attn_shared.request import AttentionRequest
from attn_shared.served import request_of
from attn_shared.spec import LayerSpec

__all__ = ["Loaded", "forget", "loaded", "provider_of", "remember", "usable_anywhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A device whose libraries are loaded.

    Attributes:
        device: where layers run.
        inventory: what was found for it.
        capability: of the backend there.
    """

    device: DeviceFacts
    inventory: Inventory
    capability: Capability

    @property
    def usable(self) -> tuple[str, ...]:
        """The libraries that may run a layer."""
        names = libraries_for(self.device)
        return tuple(name for name in names if self.inventory.get(name).is_usable)


_BY_ARCH: dict[str, Loaded] = {}

# One object for each build, so that layers and steps tell theirs apart by identity.
_INTERNED: dict[Provider, Provider] = {}


def remember(device: DeviceFacts, inventory: Inventory) -> None:
    """Note that layers may be built for a device; the latest word on an architecture counts."""
    _BY_ARCH[device.arch] = Loaded(
        device=device, inventory=inventory, capability=capability_on(device, inventory)
    )


def forget() -> None:
    """Forget all devices, as a process has begun."""
    _BY_ARCH.clear()


def usable_anywhere() -> frozenset[str]:
    """Return the libraries that may run a layer on some device; empty while none is loaded."""
    return frozenset(name for entry in _BY_ARCH.values() for name in entry.usable)


def loaded() -> tuple[Loaded, ...]:
    """Return what is loaded, one entry for each architecture.

    Raises:
        VendorMissingError: nothing is.
    """
    if _BY_ARCH:
        return tuple(_BY_ARCH.values())
    raise VendorMissingError(
        f"{NAME} is not loaded in this process.",
        hint="select it, or call FlashAttnBackend.load_vendor(device, inventory) first.",
    )


def provider_of(spec: LayerSpec) -> tuple[Provider, Loaded]:
    """Return the build that runs a layer, and the device that it was resolved for.

    Raises:
        VendorMissingError: nothing is loaded.
        UnsupportedOptionError: no build serves the layer, or the process has loaded GPUs of
            several architectures that would need different ones.
    """
    request = request_of(spec)
    found = [(_resolve(entry, request), entry) for entry in loaded()]
    if len({provider for provider, _ in found}) > 1:
        words = "; ".join(f"{entry.device.arch}: {provider}" for provider, entry in found)
        raise UnsupportedOptionError(
            f"the GPUs of this process need different builds for one layer ({words}).",
            hint="let a process see GPUs of one architecture (CUDA_VISIBLE_DEVICES).",
        )
    return found[-1]


def _resolve(entry: Loaded, request: AttentionRequest) -> Provider:
    resolution = resolve_provider(entry.device, entry.inventory, request)
    if resolution.provider is not None:
        return _INTERNED.setdefault(resolution.provider, resolution.provider)
    raise UnsupportedOptionError(
        f"{NAME} does not serve this layer on {entry.device.arch}: {resolution.reason}.",
        hint=f"libraries that it looks for here: {', '.join(libraries_for(entry.device))}.",
    )
