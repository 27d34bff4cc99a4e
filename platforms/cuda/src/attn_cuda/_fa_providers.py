"""Which build of FlashAttention runs a request: one answer for selection and for constructors.

A build is refused by what its kernels have for a device, and by what it was compiled with or takes
as arguments (`_fa_checks`).
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_cuda._fa_checks import Library, objections
from attn_shared.capability import Reason
from attn_shared.device import DeviceFacts
from attn_shared.inventory import Inventory, VendorEntry
from attn_shared.kernel_paths import KernelPath
from attn_shared.request import AttentionRequest

__all__ = [
    "LIBRARIES",
    "Provider",
    "Resolution",
    "libraries_for",
    "page_multiple",
    "provider_paths",
    "resolve_provider",
]

# FlashAttention 4 has kernels for 8.x and 12.x too, which read no pages.
_ALL_MAJORS = (8, 9, 10, 11, 12)
_LIBRARIES = (
    Library(name="vllm_flash_attn_3", version=3, majors=(9,), writes_out=True),
    Library(name="flash_attn_3", version=3, majors=(9,)),
    Library(name="fa3_fwd", version=3, majors=(9,)),
    Library(name="flash_attn_4", version=4, majors=(9, 10, 11)),
    Library(name="vllm_flash_attn_2", version=2, majors=_ALL_MAJORS, writes_out=True),
    Library(name="flash_attn", version=2, majors=_ALL_MAJORS, page_multiple=256),
)
LIBRARIES = tuple(library.name for library in _LIBRARIES)
"""All libraries by name, in the order in which they are taken within one generation."""

_VERSIONS = {9: (3, 4, 2), 10: (4, 2), 11: (2, 4)}
"""Generations in the order in which a family of devices takes them; (2,) for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """The build that runs a layer.

    Attributes:
        library: its name in the inventory.
        version: the generation of FlashAttention.
        release: of the library, where it is known.
        writes_out: its call takes the output.
        has_schedule: it schedules a step ahead of its layers.
    """

    library: str
    version: int
    release: str | None = None
    writes_out: bool = False
    has_schedule: bool = False

    def __str__(self) -> str:
        """Read as "FlashAttention 3 of vllm_flash_attn_3 0.25.1"."""
        release = f" {self.release}" if self.release else ""
        return f"FlashAttention {self.version} of {self.library}{release}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A provider, or the one reason why there is none."""

    provider: Provider | None = None
    reason: Reason | None = None


def libraries_for(device: DeviceFacts) -> tuple[str, ...]:
    """Return the libraries that have kernels for a device, the one that is taken first first."""
    return tuple(library.name for library in _ranked(device, None))


def page_multiple(device: DeviceFacts, inventory: Inventory) -> int:
    """Return what pages must be a multiple of, for the most permissive usable library."""
    usable = [
        library.page_multiple
        for library in _ranked(device, None)
        if inventory.get(library.name).is_usable and library.name != "fa3_fwd"
    ]
    return min(usable, default=16)


def resolve_provider(
    device: DeviceFacts, inventory: Inventory, request: AttentionRequest
) -> Resolution:
    """Return the build that serves a request on a device, or why none does.

    Pure. A library that is installed and not probed yet counts as complete.

    Args:
        device: where the kernels run.
        inventory: what is installed.
        request: what is asked; a named `flash_attn_version` is taken or refused, never replaced.
    """
    provider, refused = _tried(device, inventory, request, request.flash_attn_version)
    if provider is not None:
        return Resolution(provider=provider)
    return Resolution(reason=_refusal(device, inventory, request, refused))


def provider_paths(
    device: DeviceFacts, inventory: Inventory, request: AttentionRequest
) -> tuple[KernelPath, ...]:
    """Return the build that serves a request, and why none of those that come before it does."""
    provider, refused = _tried(device, inventory, request, request.flash_attn_version)
    if provider is None:
        return ()
    words = [
        f"{library.name}: {'; '.join(map(str, against)) or entry.describe()}"
        for library, entry, against in refused
    ]
    why = f"the first for {device.arch}"
    if words:
        why = f"the first for {device.arch} that serves it; before it {' | '.join(words)}"
    return (KernelPath(rows="all rows", kernel=str(provider), why=why),)


def _tried(
    device: DeviceFacts, inventory: Inventory, request: AttentionRequest, version: int | None
) -> tuple[Provider | None, list[_Refused]]:
    """Return the first build that serves, of one generation or of all, and those before it."""
    refused: list[_Refused] = []
    for library in _ranked(device, version):
        entry = inventory.get(library.name)
        against = list(objections(library, entry.build, device, request))
        if entry.is_usable and not against:
            return _provider(library, entry), refused
        refused.append((library, entry, against))
    return None, refused


def _ranked(device: DeviceFacts, version: int | None) -> list[Library]:
    major = 0 if device.capability is None else device.capability.major
    versions = _VERSIONS.get(major, (2,)) if version is None else (version,)
    return [
        library
        for wanted in versions
        for library in _LIBRARIES
        if library.version == wanted and major in library.majors
    ]


def _provider(library: Library, entry: VendorEntry) -> Provider:
    arguments = frozenset() if entry.build is None else entry.build.optional_arguments
    return Provider(
        library=library.name,
        version=library.version,
        release=entry.version,
        writes_out=library.writes_out or "fwd.out" in arguments,
        has_schedule=_SCHEDULED.get(library.name) in arguments,
    )


# By the argument that shows it. The Python function of flash_attn_3 takes a schedule too, and
# bounds the keys by the block table's width, where the schedule was made for the step's.
_SCHEDULED = {
    "flash_attn_3": "fwd.out",
    "vllm_flash_attn_3": "flash_attn_varlen_func.scheduler_metadata",
}

_Refused = tuple[Library, VendorEntry, list[Reason]]
"""A library, what is known of it, and what it objects to."""

_Met = list[tuple[str, list[Reason]]]
"""Names of libraries, and what each objects to."""


def _refusal(
    device: DeviceFacts, inventory: Inventory, request: AttentionRequest, refused: list[_Refused]
) -> Reason:
    """Sum up: what the usable builds object to, and what would mend it."""
    hint = "; ".join(
        entry.describe()
        for _, entry, why in refused
        if not entry.is_usable and not why and entry.install
    )
    met = [(entry.name, why) for _, entry, why in refused if why and entry.is_usable]
    if request.flash_attn_version is not None:
        found = met or [(entry.name, why) for _, entry, why in refused if why]
        return _named_refusal(device, inventory, request, found, hint)
    if not met:
        return _no_build(device, inventory, hint)
    first = met[0][1][0]
    allowed = " | ".join(
        f"{name}: {why[0].allowed if why[0].code == first.code else why[0]}" for name, why in met
    )
    return Reason(code=first.code, value=first.value, allowed=allowed, hint=hint or first.hint)


def _named_refusal(
    device: DeviceFacts, inventory: Inventory, request: AttentionRequest, met: _Met, hint: str
) -> Reason:
    """Say which versions would serve this request instead, and why the one named does not."""
    version = request.flash_attn_version
    others = sorted({library.version for library in _ranked(device, None)} - {version})
    serving = [
        str(other) for other in others if _tried(device, inventory, request, other)[0] is not None
    ]
    served = f"{', '.join(serving) or 'no version'} on {device.arch}"
    words = [f"{name}: {'; '.join(map(str, why))}" for name, why in met]
    allowed = " | ".join([served, *words])
    return Reason(code="flash_attn_version", value=str(version), allowed=allowed, hint=hint)


def _no_build(device: DeviceFacts, inventory: Inventory, hint: str) -> Reason:
    """Say that nothing usable is for this device, and for which devices the rest is."""
    here = [item for item in _LIBRARIES if inventory.get(item.name).is_usable]
    families = [f"{item.name}: {', '.join(f'{major}.x' for major in item.majors)}" for item in here]
    allowed = " | ".join(families) or ", ".join(libraries_for(device))
    return Reason(code="flash_attn_build", value=device.arch, allowed=allowed, hint=hint)
