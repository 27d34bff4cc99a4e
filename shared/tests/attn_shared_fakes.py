"""Devices, libraries, backends and platforms that exist for the tests alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from attn_shared.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
)
from attn_shared.capability import Capability
from attn_shared.device import DeviceCapability, DeviceFacts, Fp8Format, Vendor
from attn_shared.inventory import Inventory, VendorEntry, VendorSpec, VendorStatus
from attn_shared.limits import DeviceLimit, MultipleOf, SizeSet
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.platform import Availability, Candidate, Platform
from attn_shared.registry import BACKEND_GROUP, MLA_PREFILL_GROUP, PLATFORM_GROUP, BackendRegistry
from attn_shared.request import AttentionRequest

GPU = DeviceFacts(
    vendor=Vendor.NVIDIA,
    name="NVIDIA Fake",
    arch="sm_90",
    capability=DeviceCapability(vendor=Vendor.NVIDIA, major=9, minor=0),
    arch_family="hopper",
    fp8=Fp8Format.E4M3FN,
    memory_bytes=2**37,
    compute_units=132,
    index=0,
)

CPU = DeviceFacts(
    vendor=Vendor.CPU,
    name="Fake CPU",
    arch="x86_64",
    capability=None,
    arch_family="x86",
    fp8=Fp8Format.NONE,
    isa=("avx2", "avx512_bf16"),
)


def request(**options: Any) -> AttentionRequest:
    """Return a small request with some options."""
    return AttentionRequest(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 64, **options})


def capability(**options: Any) -> Capability:
    """Return a capability of few features on any NVIDIA device, with some options."""
    plain = {
        "devices": (DeviceLimit(vendor=Vendor.NVIDIA),),
        "dtypes": frozenset({torch.bfloat16, torch.float16}),
        "head_sizes": SizeSet(minimum=8, maximum=256, multiple_of=8),
        "block_sizes": (MultipleOf(16),),
    }
    return Capability(**{**plain, **options})


def library(name: str, status: VendorStatus = VendorStatus.PRESENT, **facts: Any) -> VendorEntry:
    """Return what is known of a library."""
    return VendorEntry(name=name, status=status, install=f"pip install {name}", **facts)


def library_spec(name: str, probe: str = "no_such_module:probe") -> VendorSpec:
    """Return how to find a library that is not installed; its probe may exist all the same."""
    return VendorSpec(
        name=name,
        distributions=(f"no-such-{name}",),
        module=f"no_such_{name}",
        install=f"pip install {name}",
        probe=probe,
    )


class FakeImpl(AttentionImpl[str]):
    """Returns its query."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        metadata: str,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return query


class FakeBuilder(AttentionMetadataBuilder[str]):
    """Returns how it was asked."""

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> str:
        return f"prefix {common_prefix_len}, fast {fast_build}"


class FakeBackend(AttentionBackend):
    """Can do what `capability` of this module says; the base of `backend`."""

    attn_api = ">=1,<2"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        return capability()

    @staticmethod
    def get_impl_cls() -> type[FakeImpl]:
        return FakeImpl

    @staticmethod
    def get_builder_cls() -> type[FakeBuilder]:
        return FakeBuilder


def backend(
    name: str,
    served: Callable[[DeviceFacts, Inventory], Capability] | None = None,
    *,
    load: Callable[[], None] | None = None,
    **attributes: Any,
) -> type[FakeBackend]:
    """Return a new backend class.

    Args:
        name: its name.
        served: its capability; that of this module by default.
        load: called where the vendor library would be loaded.
        attributes: further class attributes.
    """
    body: dict[str, Any] = {"__module__": __name__, "name": name, **attributes}
    if served is not None:
        body["capability"] = classmethod(lambda cls, device, inventory: served(device, inventory))
    if load is not None or "vendor_libraries" in attributes:
        run = load or (lambda: None)
        body["load_vendor"] = classmethod(lambda cls, device, inventory: run())
    return type(name, (FakeBackend,), body)


class FakePlatform(Platform):
    """One device and a fixed order of candidates."""

    name = "fake"
    vendor = Vendor.NVIDIA
    torch_device_type = "cuda"
    distribution = "attn-fake"
    precedence = 10

    present: tuple[DeviceFacts, ...] = (GPU,)
    ranks: Mapping[str, int | None] = {}
    libraries: tuple[VendorSpec, ...] = ()

    def availability(self) -> Availability:
        found = len(self.present)
        return Availability(is_available=found > 0, reason=f"{found} devices")

    def devices(self) -> tuple[DeviceFacts, ...]:
        return self.present

    def candidates(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(name=name, priority=priority, provenance="a rule")
            for name, priority in self.ranks.items()
        )

    def vendor_specs(self) -> tuple[VendorSpec, ...]:
        return self.libraries


def platform(**attributes: Any) -> type[FakePlatform]:
    """Return a new platform class with some attributes."""
    return type("FakePlatform", (FakePlatform,), attributes)


@dataclass
class FakeEntryPoint:
    """What discovery reads of an installed distribution's entry point."""

    name: str
    value: str
    distribution: str = "attn-fake"
    version: str = "1.0"
    target: object = None

    @property
    def dist(self) -> SimpleNamespace | None:
        if not self.distribution:
            return None
        return SimpleNamespace(name=self.distribution, version=self.version)

    def load(self) -> Any:
        if self.target is not None:
            return self.target
        module, _, name = self.value.partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass
class FakeEntryPoints:
    """The entry points of all installed distributions, and how often they were listed."""

    backends: Iterable[FakeEntryPoint] = ()
    platforms: Iterable[FakeEntryPoint] = ()
    prefills: Iterable[FakeEntryPoint] = ()
    listed: list[str] = field(default_factory=list)

    def __call__(self, group: str) -> Any:
        self.listed.append(group)
        groups = {BACKEND_GROUP: self.backends, MLA_PREFILL_GROUP: self.prefills}
        return {**groups, PLATFORM_GROUP: self.platforms}[group]


def registry_of(
    *backends: type[AttentionBackend],
    ranks: Mapping[str, int | None] | None = None,
    entry_points: Iterable[FakeEntryPoint] = (),
    **attributes: Any,
) -> BackendRegistry:
    """Return a registry of one platform, whose order is that of `backends` unless `ranks` says.

    Args:
        backends: classes that are registered.
        ranks: name -> priority of the platform's candidates.
        entry_points: backends of installed distributions.
        attributes: of the platform.
    """
    if ranks is None:
        ranks = {cls.name: 100 * (len(backends) - i) for i, cls in enumerate(backends)}
    fake = platform(ranks=ranks, **attributes)
    registry = BackendRegistry(
        FakeEntryPoints(entry_points, [FakeEntryPoint("fake", "fake:Platform", target=fake)])
    )
    for cls in backends:
        registry.register(cls.name, cls)
    return registry
