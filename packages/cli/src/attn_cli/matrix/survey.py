"""The matrix itself: every backend asked every question on every device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from attn_cli.matrix.answers import Answer, Cell, Witness
from attn_cli.matrix.hardware_runs import HardwareRun
from attn_cli.matrix.questions import PLAIN, QUESTIONS, Question
from attn_shared.device import PRESETS, DeviceFacts
from attn_shared.errors import AttnError, own_words
from attn_shared.inventory import Inventory
from attn_shared.known_backends import KNOWN_BACKENDS, KNOWN_MAMBA_BACKENDS, KnownBackend
from attn_shared.kv_cache import spec_for
from attn_shared.registry import BackendRegistry
from attn_shared.request import AttentionRequest
from attn_shared.selector import Selector
from attn_shared.spec import BuildConfig

__all__ = ["AskedDevice", "BackendFacts", "Matrix", "Sheet", "own_backends", "survey"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedDevice:
    """A device under the name that it was asked for by."""

    name: str
    facts: DeviceFacts

    @classmethod
    def presets(cls) -> tuple[AskedDevice, ...]:
        """Return every preset, those of one vendor together."""
        return tuple(cls(name=name, facts=facts) for name, facts in PRESETS.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """All answers of one backend on one device.

    Attributes:
        device: the device.
        plain: the request that every question differs from.
        base: the answer to that request; where it is refused, so is everything.
        cells: the answer to each question, by its key.
        preferred: block size and layout that the plain request gets, "64 NHD"; "" without a cache.
        rules: names of the backend's checks that couple several fields: one question at a time
            does not show what they refuse.
        runs: what was run of the backend on such a device.
    """

    device: AskedDevice
    plain: AttentionRequest
    base: Cell
    cells: Mapping[str, Cell]
    preferred: str = ""
    rules: tuple[str, ...] = ()
    runs: tuple[HardwareRun, ...] = ()

    @property
    def is_run(self) -> bool:
        """Whether the backend was run on such a device."""
        return bool(self.runs)

    @property
    def essence(self) -> tuple[Any, ...]:
        """What makes two sheets equal, whatever the device: they can be one column."""
        answers = tuple((key, cell.essence) for key, cell in self.cells.items())
        runs = self.runs if self.base.answer.is_served else ()
        return (self.plain, self.base.essence, answers, self.preferred, self.rules, runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What is said of a backend once for all devices.

    Attributes:
        name: its name.
        provided_by: the distribution, or who registered it; "" where that is contested.
        description: one line.
        graph_level: which batches may be captured, as its builder says; "" where it does not say.
        problem: why it cannot be loaded, or its builder not be asked; "" if there is none.
    """

    name: str
    provided_by: str = ""
    description: str = ""
    graph_level: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Every backend on every device.

    Attributes:
        questions: what was asked.
        devices: where.
        backends: whom.
        sheets: the answers by backend, one sheet per device, in the order of the devices.
        runs: what is on record of these backends.
        not_provided: names that the field knows and nothing installed provides.
    """

    questions: tuple[Question, ...]
    devices: tuple[AskedDevice, ...]
    backends: tuple[BackendFacts, ...]
    sheets: Mapping[str, tuple[Sheet, ...]]
    runs: tuple[HardwareRun, ...]
    not_provided: Mapping[str, KnownBackend]


def own_backends(registry: BackendRegistry) -> tuple[str, ...]:
    """Return the provided backends that are the project's own: no third party's, no override."""
    third_party = registry.third_party_names()
    return tuple(name for name in registry.names() if name not in third_party)


def survey(
    selector: Selector,
    *,
    devices: Sequence[AskedDevice],
    backends: Sequence[str],
    runs: Iterable[HardwareRun] = (),
    questions: Sequence[Question] = QUESTIONS,
) -> Matrix:
    """Ask.

    Args:
        selector: who knows names and what is installed; for a simulated device, everything is.
        devices: where.
        backends: names, each of them registered.
        runs: what was run on hardware.
        questions: what is asked.
    """
    kept = tuple(run for run in runs if run.backend in backends)
    inventories = [_inventory(selector, device.facts) for device in devices]
    sheets = {
        name: tuple(
            _sheet(name, device, inventory, selector.registry, kept, questions)
            for device, inventory in zip(devices, inventories, strict=True)
        )
        for name in backends
    }
    return Matrix(
        questions=tuple(questions),
        devices=tuple(devices),
        backends=tuple(_facts_of(name, selector.registry) for name in backends),
        sheets=MappingProxyType(sheets),
        runs=kept,
        not_provided=MappingProxyType(_not_provided(selector.registry)),
    )


def _inventory(selector: Selector, device: DeviceFacts) -> Inventory | str:
    """Return what is installed for a device, or why its platform cannot be asked."""
    try:
        return selector.inventory(device)
    except AttnError as error:
        return error.message


def _sheet(
    name: str,
    device: AskedDevice,
    inventory: Inventory | str,
    registry: BackendRegistry,
    runs: Iterable[HardwareRun],
    questions: Iterable[Question],
) -> Sheet:
    if isinstance(inventory, str):
        cell = Cell(answer=Answer.UNAVAILABLE, detail=inventory)
        cells = {question.key: cell for question in questions}
        return Sheet(device=device, plain=PLAIN, base=cell, cells=MappingProxyType(cells))
    witness = Witness(backend=name, device=device.facts, inventory=inventory, registry=registry)
    plain, verdict = witness.plain_request()
    base = Cell.of(verdict)
    cells = {question.key: base for question in questions}
    if not base.refuses_device:
        cells = {question.key: witness.ask(question, plain) for question in questions}
    preferred = [str(verdict.block_size), str(verdict.kv_layout)] if verdict.block_size else []
    return Sheet(
        device=device,
        plain=plain,
        base=base,
        cells=MappingProxyType(cells),
        preferred=" ".join(preferred),
        rules=witness.rules(),
        runs=tuple(run for run in runs if run.backend == name and run.covers(device.facts)),
    )


def _facts_of(name: str, registry: BackendRegistry) -> BackendFacts:
    try:
        source, backend = registry.get(name).distribution, registry.load(name)
    except AttnError as error:
        return BackendFacts(name=name, problem=error.message)
    # A builder may import a library that is not here, and a third party's may raise anything.
    level, problem = "", ""
    try:
        spec = spec_for(PLAIN, block_size=16)
        support = backend.get_builder_cls().get_cudagraph_support(BuildConfig(), spec)
        level = support.name
    except Exception as error:  # noqa: BLE001
        problem = f"its builder does not say which batches may be captured: {own_words(error)}"
    return BackendFacts(
        name=name,
        provided_by=source,
        description=backend.description,
        graph_level=level,
        problem=problem,
    )


def _not_provided(registry: BackendRegistry) -> dict[str, KnownBackend]:
    attention = {
        name: known for name, known in KNOWN_BACKENDS.items() if name not in registry.names()
    }
    recurrent = {
        name: known
        for name, known in KNOWN_MAMBA_BACKENDS.items()
        if name not in registry.names("mamba") and name not in KNOWN_BACKENDS
    }
    return attention | recurrent
