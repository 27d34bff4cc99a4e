"""A plan from the words of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attn_bench.contenders import BackendContender, Contender
from attn_bench.peers import PEERS, contender_named
from attn_bench.results import Settings
from attn_bench.run import Plan
from attn_bench.sets import workload_set
from attn_bench.traces import read_trace
from attn_bench.workloads import Heads, Workload
from attn_shared.dtypes import parse_dtype, parse_kv_cache_dtype
from attn_shared.errors import BackendNotProvidedError, InvalidInputError, UnknownNameError
from attn_shared.registry import DEFAULT_REGISTRY
from attn_shared.selector import DEFAULT_SELECTOR

__all__ = ["Asked", "make_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user asked for, in words; empty sequences stand for the defaults.

    Attributes:
        backends: names of backends; by default "auto".
        peers: names of backends or direct calls, or "module:function".
        workloads: names of sets; by default "quick", unless there is a trace.
        traces: files. They name their own layer, which nothing below changes.
        heads: layers as "32/8x128"; by default each workload's own.
        dtypes: by default each workload's own.
        kv_cache_dtype: format of the cache; None: each workload's own.
        block_size: tokens per block; None: each workload's own.
        window: keys that a row sees, its own included; None: each workload's own.
        returns_lse: every call also returns the LSE.
        own_output: every call returns a tensor of its own.
        device: a torch device; None: the current platform's first.
        settings: how to measure.
        seconds: of the whole run; None: no bound.
        notes: kept with the results.
    """

    backends: Sequence[str] = ()
    peers: Sequence[str] = ()
    workloads: Sequence[str] = ()
    traces: Sequence[Path] = ()
    heads: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    window: int | None = None
    returns_lse: bool = False
    own_output: bool = False
    device: str | None = None
    settings: Settings = field(default_factory=Settings)
    seconds: float | None = None
    notes: Sequence[str] = ()


def make_plan(asked: Asked) -> Plan:
    """Return the plan that someone asked for.

    Raises:
        UnknownNameError: a backend, peer, set, dtype or format of such a name does not exist.
        InvalidInputError: heads, device, time or a trace are not what they should be.
        NoBackendError: this machine has no such device.
        VendorMissingError: a peer's library is not installed.
    """
    if asked.seconds is not None and not asked.seconds > 0:
        raise InvalidInputError.for_argument("seconds", asked.seconds, "a number > 0")
    workloads = _workloads(asked)
    if not workloads:
        raise InvalidInputError.for_argument("workloads", "none", "at least one")
    return Plan(
        workloads=workloads,
        backends=[_backend(name) for name in asked.backends or ("auto",)],
        peers=[_peer(name) for name in asked.peers],
        device=_device(asked.device),
        settings=asked.settings,
        seconds=asked.seconds,
        notes=tuple(asked.notes),
    )


def _workloads(asked: Asked) -> tuple[Workload, ...]:
    """Return each set for each layer and dtype, then the traces."""
    sets = asked.workloads or (() if asked.traces else ("quick",))
    dtypes: list[dict[str, Any]] = [{"dtype": parse_dtype(name)} for name in asked.dtypes]
    heads: list[dict[str, Any]] = [{"heads": Heads.parse(text)} for text in asked.heads]
    common = _common_changes(asked)
    found = [
        workload.with_fields(**dtype, **layer, **common)
        for dtype, layer in product(dtypes or [{}], heads or [{}])
        for workload in workload_set(sets)
    ]
    steps = [step for path in asked.traces for step in read_trace(path)]
    return tuple(dict.fromkeys([*found, *steps]))


def _common_changes(asked: Asked) -> dict[str, Any]:
    """Return the fields of every workload that someone asked for."""
    changes: dict[str, Any] = {}
    if asked.kv_cache_dtype is not None:
        changes["kv_cache_dtype"] = parse_kv_cache_dtype(asked.kv_cache_dtype)
    for name in ("block_size", "window"):
        if getattr(asked, name) is not None:
            changes[name] = getattr(asked, name)
    return changes | {name: True for name in ("returns_lse", "own_output") if getattr(asked, name)}


def _backend(name: str) -> Contender:
    if name != "auto" and name not in DEFAULT_REGISTRY.names("mla_prefill"):
        DEFAULT_REGISTRY.get(name)  # an unknown name is refused here, before anything is measured
    return BackendContender(name)


def _peer(name: str) -> Contender:
    contender = contender_named(name)
    if not isinstance(contender, BackendContender):
        return contender
    try:
        return _backend(name)
    except BackendNotProvidedError:
        raise  # a backend's name, with what provides it
    except UnknownNameError:
        known = [*PEERS, *DEFAULT_REGISTRY.names()]
        raise UnknownNameError.for_name("peer", name, known) from None


def _device(name: str | None) -> torch.device:
    """Return the device, after making sure that this machine has it."""
    text = DEFAULT_SELECTOR.current_platform().torch_device_type if name is None else name
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise InvalidInputError.for_argument(
            "device", repr(text), "a torch device of this machine: cpu, cuda:0, xpu"
        ) from error
    DEFAULT_SELECTOR.device_facts(device)
    return device
