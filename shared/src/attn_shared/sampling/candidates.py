"""Who may sample on a device: this package's sampler, the platform's, and registered ones."""

from __future__ import annotations

from collections.abc import Iterable

from attn_shared._plugins import import_path
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError, own_words
from attn_shared.inventory import Inventory, assume_all, scan
from attn_shared.sampling.backend import SamplerBackend
from attn_shared.sampling.request import SamplerRequest
from attn_shared.sampling.selection import SamplerSelection, select_sampler
from attn_shared.sampling.torch_sampler import TorchSampler
from attn_shared.selection import Policy
from attn_shared.selector import DEFAULT_SELECTOR, Selector

__all__ = ["candidates", "inventory_of", "register_sampler", "sampler_selection"]

_REGISTERED: dict[str, type[SamplerBackend]] = {}


def register_sampler(sampler: type[SamplerBackend]) -> None:
    """Offer a sampler of one's own in this process, on whichever devices it admits.

    Raises:
        InvalidInputError: it is no class of a `SamplerBackend`, or its name is another's.
    """
    if not (isinstance(sampler, type) and issubclass(sampler, SamplerBackend)):
        raise InvalidInputError.for_argument("sampler", repr(sampler), "a SamplerBackend's class")
    known = _REGISTERED.get(sampler.name)
    if sampler.name == TorchSampler.name or known not in (None, sampler):
        raise InvalidInputError.for_argument("sampler.name", sampler.name, "a name of its own")
    _REGISTERED[sampler.name] = sampler


def candidates(
    device: DeviceFacts, selector: Selector = DEFAULT_SELECTOR
) -> tuple[list[type[SamplerBackend]], dict[str, str]]:
    """Return the samplers for a device, and those that could not be imported, with their words."""
    found: list[type[SamplerBackend]] = []
    failures = {}
    for path in selector.registry.platform_for(device.vendor).samplers:
        # A platform's module may raise anything; that sampler is out, and its words are shown.
        try:
            found.append(import_path(path))
        except Exception as error:  # noqa: BLE001
            failures[path] = own_words(error)
    return [*found, *_REGISTERED.values(), TorchSampler], failures


def inventory_of(device: DeviceFacts, samplers: Iterable[type[SamplerBackend]]) -> Inventory:
    """Return what is installed of the libraries that samplers need; all, for a simulated device."""
    specs = [sampler.vendor for sampler in samplers if sampler.vendor is not None]
    return assume_all(specs) if device.is_simulated else scan(specs)


def sampler_selection(
    request: SamplerRequest, device: DeviceFacts, policy: Policy | None = None
) -> SamplerSelection:
    """Choose a sampler for any device, here or elsewhere; nothing is loaded for it.

    Raises:
        AttnError: as `select_sampler`.
    """
    classes, failures = candidates(device)
    return select_sampler(request, device, inventory_of(device, classes), classes, policy, failures)
