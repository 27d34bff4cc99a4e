"""For which devices this process has loaded a backend's libraries, and what was found there.

A layer is built from its description alone, which names no device; which libraries are loaded is a
fact of the process, as sys.modules is. A backend's `load_vendor` notes it here, and the
constructors of its layers ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import VendorMissingError, own_words
from attn_shared.inventory import Inventory
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec

__all__ = ["LoadedDevice", "LoadedDevices", "import_vendor"]


def import_vendor(library: str, load: Callable[[], object]) -> None:
    """Import a library, for a backend's `load_vendor`.

    Args:
        library: its name in the inventory.
        load: imports it, and raises an ImportError where it does not load.

    Raises:
        VendorMissingError: it does not load, in its own words.
    """
    try:
        load()
    except ImportError as error:
        raise VendorMissingError(
            f"{library} does not load: {own_words(error)}.", library=library
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDevice:
    """A device whose libraries are loaded.

    Attributes:
        device: where layers run.
        inventory: what was found for it.
        capability: of the backend there.
    """

    device: DeviceFacts
    inventory: Inventory
    capability: Capability


class LoadedDevices:
    """One backend's devices; the latest word on an architecture counts."""

    def __init__(
        self, name: str, capability: Callable[[DeviceFacts, Inventory], Capability]
    ) -> None:
        """Keep the backend's name, for messages, and what tells its capability."""
        self._name, self._capability = name, capability
        self._by_arch: dict[str, LoadedDevice] = {}

    def remember(self, device: DeviceFacts, inventory: Inventory) -> None:
        """Note that layers may be built for a device."""
        found = self._capability(device, inventory)
        self._by_arch.pop(device.arch, None)
        self._by_arch[device.arch] = LoadedDevice(
            device=device, inventory=inventory, capability=found
        )

    def forget(self) -> None:
        """Forget all devices, as a process has begun."""
        self._by_arch.clear()

    def latest(self) -> LoadedDevice:
        """Return the device that was loaded last.

        Raises:
            VendorMissingError: none is.
        """
        if not self._by_arch:
            raise VendorMissingError(
                f"{self._name} is not loaded in this process.",
                hint="select it, or call its load_vendor(device, inventory) first.",
            )
        return list(self._by_arch.values())[-1]

    def serving(self, spec: LayerSpec) -> LoadedDevice:
        """Return the device that was loaded last, after refusing a layer that it does not serve.

        Raises:
            VendorMissingError: none is loaded.
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: with every reason.
        """
        found = self.latest()
        require_served(self._name, found.capability, spec, found.device)
        return found
