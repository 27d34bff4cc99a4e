"""For which devices this process has loaded FlashInfer, and which release.

A layer is built from its description alone, which names no device; what is loaded is a fact of the
process. `load_vendor` notes it here, and layers and builders ask.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_cuda._vendor.flashinfer_library import library
from attn_shared.device import DeviceFacts
from attn_shared.errors import UnsupportedOptionError, VendorMissingError, own_words
from attn_shared.inventory import Inventory, VendorBuild

__all__ = ["LIBRARY", "Loaded", "families", "forget", "load", "loaded"]

LIBRARY = "flashinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """FlashInfer on one kind of device.

    Attributes:
        device: where layers run.
        inventory: what was found for it.
    """

    device: DeviceFacts
    inventory: Inventory

    @property
    def build(self) -> VendorBuild | None:
        """What the probe found, or None where it was not probed."""
        return self.inventory.get(LIBRARY).build

    @property
    def major(self) -> int:
        """The major of the device's compute capability."""
        return 0 if self.device.capability is None else self.device.capability.major

    def takes(self, argument: str) -> bool:
        """Whether this release's call has an argument, "prefill.run.lse_base" for instance."""
        return self.build is not None and argument in self.build.optional_arguments


_BY_ARCH: dict[str, Loaded] = {}


def load(device: DeviceFacts, inventory: Inventory) -> None:
    """Import the library, and note for which device; the latest word on an architecture counts.

    Raises:
        VendorMissingError: it does not load, in its own words.
    """
    try:
        library()
    except ImportError as error:
        raise VendorMissingError(
            f"{LIBRARY} does not load: {own_words(error)}.", library=LIBRARY
        ) from error
    _BY_ARCH[device.arch] = Loaded(device=device, inventory=inventory)


def forget() -> None:
    """Forget all devices, as a process has begun."""
    _BY_ARCH.clear()


def families() -> frozenset[int]:
    """Return the majors of the loaded devices; empty while none is."""
    return frozenset(entry.major for entry in _BY_ARCH.values())


def loaded(name: str) -> Loaded:
    """Return what is loaded.

    Args:
        name: of the backend that asks.

    Raises:
        VendorMissingError: nothing is.
        UnsupportedOptionError: GPUs whose kernels differ are, and a layer does not say which.
    """
    if not _BY_ARCH:
        raise VendorMissingError(
            f"{name} is not loaded in this process.",
            hint="select it, or call its load_vendor(device, inventory) first.",
        )
    if len(families()) > 1:
        raise UnsupportedOptionError(
            f"the GPUs of this process need different kernels of FlashInfer "
            f"({', '.join(sorted(_BY_ARCH))}).",
            hint="let a process see GPUs of one family (CUDA_VISIBLE_DEVICES).",
        )
    return list(_BY_ARCH.values())[-1]
