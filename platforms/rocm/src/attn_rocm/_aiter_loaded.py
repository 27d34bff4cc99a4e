"""For which devices this process has loaded AITER, and which release.

A layer is built from its description alone, which names no device; what is loaded is a fact of the
process, as sys.modules is. Backends note it here when their library is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_rocm._aiter_build import AiterBuild, build_in
from attn_rocm._vendor import aiter
from attn_shared.device import DeviceFacts, common_fp8_dtype
from attn_shared.errors import UnsupportedOptionError, VendorMissingError, own_words
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec

__all__ = ["Loaded", "forget", "load", "loaded", "require_own_flavour"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A device for which AITER is loaded.

    Attributes:
        device: where layers run.
        inventory: what was found for it.
    """

    device: DeviceFacts
    inventory: Inventory

    @property
    def build(self) -> AiterBuild:
        """The release."""
        return build_in(self.inventory)


_BY_ARCH: dict[str, Loaded] = {}


def load(device: DeviceFacts, inventory: Inventory) -> None:
    """Import AITER, and note for which device; the latest word on an architecture counts.

    Raises:
        VendorMissingError: it does not load, in its own words.
    """
    try:
        aiter.library()
    except Exception as error:
        raise VendorMissingError(
            f"{aiter.SPEC.name} does not load: {own_words(error)}.", library=aiter.SPEC.name
        ) from error
    _BY_ARCH[device.arch] = Loaded(device=device, inventory=inventory)


def forget() -> None:
    """Forget all devices, as a process has begun."""
    _BY_ARCH.clear()


def loaded(name: str) -> Loaded:
    """Return the device that AITER was loaded for last.

    Args:
        name: of the backend that asks, for the message.

    Raises:
        VendorMissingError: it was loaded for none.
    """
    if _BY_ARCH:
        return next(reversed(_BY_ARCH.values()))
    raise VendorMissingError(
        f"{name} is not loaded in this process.",
        library=aiter.SPEC.name,
        hint="select it, or call load_vendor(device, inventory) of its class first.",
    )


def require_own_flavour(name: str, cache: KVCacheSpec | None) -> None:
    """Refuse an e4m3 cache in another flavour than that of the process's devices.

    Args:
        name: of the backend, for the message.
        cache: of the layer.

    Raises:
        UnsupportedOptionError: the cache is in the other flavour.
        InvalidInputError: the devices differ in theirs.
    """
    flavours = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    if not isinstance(cache, AttentionSpec) or cache.dtype not in flavours:
        return
    devices = [entry.device for entry in _BY_ARCH.values()]
    own = common_fp8_dtype(devices)
    if own is not None and cache.dtype is own:
        return
    archs = ", ".join(device.arch for device in devices)
    raise UnsupportedOptionError(
        f"a cache of {cache.dtype} is not served by {name} on {archs}; allowed: {own}.",
        hint="allocate it with the device's flavour: fp8_e4m3_dtype=device.fp8_dtype.",
    )
