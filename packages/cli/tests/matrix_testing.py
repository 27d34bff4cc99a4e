"""Backends for the tests of the matrix: what they can do is all that there is of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_cli.matrix.answers import Witness
from attn_cli.matrix.hardware_runs import HardwareRun
from attn_cli.matrix.questions import QUESTIONS, Question
from attn_cli.matrix.survey import AskedDevice, Matrix, survey
from attn_shared.backend import AttentionBackend, AttentionImplBase, AttentionMetadataBuilder
from attn_shared.capability import Capability, DeviceLimit, MultipleOf, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor, resolve_device
from attn_shared.dtypes import KV_CACHE_DTYPES, KVCacheLayout
from attn_shared.inventory import Inventory
from attn_shared.registry import PLATFORM_GROUP, BackendRegistry
from attn_shared.request import AttentionType
from attn_shared.selector import Selector

BARE = Capability(
    devices=tuple(DeviceLimit(vendor=vendor) for vendor in Vendor),
    dtypes=frozenset({torch.bfloat16}),
    head_sizes=SizeSet.of(64, 128),
    block_sizes=(MultipleOf(16),),
)
"""No feature at all."""

FEATURES = tuple(BARE.to_dict()["features"])
"""The codes of all features that a capability may have."""

_FIELDS = {"sink": "sinks", "batch_invariance": "batch_invariant"}

ALL = replace(
    BARE,
    dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
    head_sizes=SizeSet(),
    head_sizes_v=SizeSet(),
    block_sizes=(1,),
    kv_cache_dtypes=frozenset(KV_CACHE_DTYPES),
    attn_types=frozenset(AttentionType),
    kv_layouts=tuple(KVCacheLayout),
    **{_FIELDS.get(code, code): Support.YES for code in FEATURES},
)
"""Every feature, of ordinary heads."""


def without(code: str, support: Support = Support.NO) -> Capability:
    """ALL, but for one feature."""
    changes: dict[str, Any] = {_FIELDS.get(code, code): support}
    return replace(ALL, **changes)


Ability = Capability | Callable[[DeviceFacts], Capability]


def backend_of(name: str, ability: Ability, description: str = "") -> type[AttentionBackend]:
    """A backend that can do this, on each device or as a function of it."""

    class Fake(AttentionBackend):
        attn_api = ">=1,<2"

        @classmethod
        def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
            return ability if isinstance(ability, Capability) else ability(device)

        @staticmethod
        def get_impl_cls() -> type[AttentionImplBase[Any]]:
            raise NotImplementedError

        @staticmethod
        def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
            raise NotImplementedError

    Fake.name, Fake.description = name, description
    return Fake


def selector_of(**abilities: Ability) -> Selector:
    """Every platform, and these backends alone."""

    def entry_points(group: str) -> Iterable[importlib.metadata.EntryPoint]:
        return importlib.metadata.entry_points(group=group) if group == PLATFORM_GROUP else ()

    registry = BackendRegistry(entry_points=entry_points)
    for name, ability in abilities.items():
        registry.register(name, backend_of(name, ability), source="a test")
    return Selector(registry)


def witness_of(ability: Ability, device: str = "h200") -> Witness:
    """A backend with this ability on one device."""
    registry = selector_of(FAKE=ability).registry
    facts = resolve_device(device)
    return Witness(backend="FAKE", device=facts, inventory=Inventory(), registry=registry)


def devices(*names: str) -> tuple[AskedDevice, ...]:
    """Devices by the names of presets or architectures."""
    return tuple(AskedDevice(name=name, facts=resolve_device(name)) for name in names)


def matrix_of(
    *names: str,
    runs: Iterable[HardwareRun] = (),
    questions: Sequence[Question] = QUESTIONS,
    **abilities: Ability,
) -> Matrix:
    """Fake backends on these devices; on every preset if none is named."""
    selector = selector_of(**abilities)
    return survey(
        selector,
        devices=devices(*names) if names else AskedDevice.presets(),
        backends=tuple(abilities),
        runs=runs,
        questions=questions,
    )


def question(key: str) -> Question:
    """A question by its key."""
    return next(asked for asked in QUESTIONS if asked.key == key)


def run_of(backend: str, **changes: Any) -> HardwareRun:
    """A run on an H200."""
    fields = {
        "backend": backend,
        "arch": "sm_90",
        "device": "NVIDIA H200",
        "date": "2026-01-31",
        "versions": (("torch", "2.11.0"),),
        "what": "everything",
        "passed": 12,
        "record": "in a drawer",
    }
    return HardwareRun(**{**fields, **changes})
