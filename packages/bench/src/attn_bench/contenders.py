"""What is timed: a backend of attn, or a direct call of something else on the same shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_bench.inputs import LayerTensors, Step, make_step, new_keys_of, stored_keys_of
from attn_bench.workloads import Workload
from attn_shared.backend import AttentionCGSupport
from attn_shared.cascade import common_prefix_len
from attn_shared.errors import UnsupportedOptionError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import AttentionSpec, KVViews
from attn_shared.layer import Attention
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.quantization import FP8_DTYPES
from attn_shared.selection import Selection
from attn_shared.selector import DEFAULT_SELECTOR
from attn_shared.spec import BuildConfig

__all__ = ["BackendContender", "Contender", "Copy", "Prepared", "empty_lse", "libraries_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """One set of inputs, ready to run.

    Attributes:
        call: what is timed.
        tokens: turns what `call` returns into (T, Hq, Dv).
        query: makes the query (T, Hq, D).
        keys: makes the keys and values of one request as stored, each (seq_len, Hkv, D).
        lengths: (query_len, seq_len) of each request, in the order of the query's rows.
        lse: turns what `call` returns into (Hq, T), natural logarithm; None where it has none.
        window: keys (left, right) of a row beside its own.
        scale: factor on q.k; None: 1 / sqrt(D).
        compute_dtype: of the products, where it is not the query's: fp8 for a call that multiplies
            in it.
        error_factor: how many times the contract's budget it may err; above 1 for a direct call
            whose own rounding is coarser, which its notes then say.
    """

    call: Callable[[], Any]
    tokens: Callable[[Any], Tensor]
    query: Callable[[], Tensor]
    keys: Callable[[int], KVViews]
    lengths: tuple[tuple[int, int], ...]
    lse: Callable[[Any], Tensor] | None = None
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    compute_dtype: torch.dtype | None = None
    error_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A contender with its inputs laid out.

    Attributes:
        name: what runs; differs from the contender's where that leaves the choice.
        copies: sets of inputs, which are timed in turn; all are of one batch.
        block_size: tokens per block of its cache; None without a cache.
        graph_level: which batches it declares that a graph may capture.
        plan: the host's work of a step, on a batch in its order; None where there is none.
        notes: what a reader of the figures must know.
        libraries: versions of the vendor libraries that it stands on.
        is_attention: its calls answer; False for a yardstick, whose calls return anything.
    """

    name: str
    copies: tuple[Copy, ...]
    block_size: int | None = None
    graph_level: AttentionCGSupport = AttentionCGSupport.ALWAYS
    plan: Callable[[], object] | None = None
    notes: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    is_attention: bool = True


class Contender(ABC):
    """Something that can run a workload."""

    name: str

    @abstractmethod
    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        """Lay out inputs and build what runs them.

        Args:
            workload: the batch.
            device: where it runs.
            num_copies: sets of inputs.
            is_captured: the calls go into a graph.

        Raises:
            AttnError: it cannot run this workload; says why.
        """


class BackendContender(Contender):
    """A backend of attn, called through its implementation as an engine calls it.

    The cache is written already, and the step's keys and values are handed over as well, as an
    engine does: a backend may read either, unless the cache is quantised.
    """

    def __init__(self, name: str) -> None:
        """Name the backend; "auto" lets the selector choose."""
        self.name = name

    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        """Select and build the layer, and fill `num_copies` caches of it."""
        if workload.heads.mla is not None:
            from attn_bench.latents import prepare_latents

            return prepare_latents(self.name, workload, device, num_copies, is_captured=is_captured)
        layer = self._layer(workload, device)
        spec = layer.kv_cache_spec
        if not isinstance(spec, AttentionSpec):
            raise UnsupportedOptionError(f"{self.name} has no paged cache to read.")
        step = make_step(workload, spec, device, num_copies)
        planner = _Planner(layer, step.common, workload, is_captured)
        chosen = layer.selection.chosen or self.name
        return Prepared(
            name=chosen,
            copies=tuple(_copy(layer, step, tensors, planner, workload) for tensors in step.layers),
            block_size=spec.block_size,
            graph_level=layer.builder.get_cudagraph_support(layer.config, spec),
            plan=planner.build,
            notes=(*_provider(layer, chosen), *_slow_features(layer, chosen), *planner.notes),
            libraries=libraries_of(layer.selection),
        )

    def _layer(self, workload: Workload, device: torch.device) -> Attention:
        heads = workload.heads
        return Attention(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            dtype=workload.dtype,
            kv_cache_dtype=workload.kv_cache_dtype,
            block_size=workload.block_size,
            device=device,
            backend=self.name,
            window=workload.window_sides,
            needs_lse=workload.returns_lse,
            config=BuildConfig(
                max_num_seqs=workload.batch,
                max_num_tokens=workload.num_tokens,
                max_model_len=workload.context,
                capture_sizes=(workload.num_tokens,),
            ),
        )


class _Planner:
    """The host's work of a step: cascade attention where the backend asks for it, else a plan.

    Cascade batches are never captured.

    Attributes:
        common: the batch, in the order that the backend needs.
        metadata: what the calls are made with.
        notes: what a reader of the figures must know.
    """

    def __init__(
        self,
        layer: Attention,
        common: CommonAttentionMetadata,
        workload: Workload,
        is_captured: bool,
    ) -> None:
        self._builder = layer.builder
        self._prefix = 0 if is_captured else _prefix_to_cascade(layer, common, workload)
        self.notes = (f"cascade over {self._prefix} tokens",) if self._prefix else ()
        self.common, self.metadata = common, None
        if self._prefix:
            self.metadata = self.build()
            return
        plan = layer.plan(common)
        self.common, self.metadata = plan.common, plan.metadata
        if is_captured:
            self.metadata = self._builder.build_for_cudagraph_capture(plan.common)

    def build(self) -> Any:
        """Build the step's metadata from the batch in the backend's order."""
        return self._builder.build(self._prefix, self.common)


def _prefix_to_cascade(
    layer: Attention, common: CommonAttentionMetadata, workload: Workload
) -> int:
    """Return the shared prefix if the backend would run it once, else 0."""
    spec, table = layer.kv_cache_spec, common.block_table
    if not workload.shared_prefix_len or spec is None or table is None:
        return 0
    computed = [seq_len - query_len for query_len, seq_len in workload.lengths]
    prefix = common_prefix_len(table.cpu(), computed, spec.block_size)
    units = layer.selection.device.compute_units or 1
    pays = layer.builder.use_cascade_attention(prefix, workload.query_lens, units)
    return prefix if pays else 0


def _copy(
    layer: Attention, step: Step, tensors: LayerTensors, planner: _Planner, workload: Workload
) -> Copy:
    """Return the backend's own call.

    The builder may have put the requests in another order; rows are random, so the query's rows
    are taken to be in that order from the start.
    """
    common, metadata = planner.common, planner.metadata
    ordered = Step(common=common, spec=step.spec, layers=step.layers)
    pairs = zip(common.query_lens_cpu.tolist(), common.exact_seq_lens_cpu.tolist(), strict=True)
    lengths = tuple(pairs)
    output = None if workload.own_output else tensors.output
    key, value = new_keys_of(ordered, tensors)
    lse = empty_lse(tensors.query) if workload.returns_lse else None

    def call() -> Tensor:
        return layer.impl.forward(
            layer, tensors.query, key, value, tensors.kv_cache, metadata, output, lse=lse
        )

    return Copy(
        call=call,
        tokens=lambda output: output,
        query=lambda: tensors.query,
        keys=lambda request: stored_keys_of(ordered, tensors, request, lengths[request][1]),
        lengths=lengths,
        lse=None if lse is None else lambda output: lse,
        window=workload.window_sides,
        compute_dtype=_compute_dtype(layer),
    )


def empty_lse(query: Tensor) -> Tensor:
    """Return (Hq, T) float32, NaN so far."""
    shape = (query.shape[1], query.shape[0])
    return torch.full(shape, torch.nan, dtype=torch.float32, device=query.device)


def _compute_dtype(layer: Attention) -> torch.dtype | None:
    """Return the cache's fp8 dtype where the backend declares that it multiplies in it."""
    spec, chosen = layer.kv_cache_spec, layer.selection.backend_cls
    if not isinstance(spec, AttentionSpec) or spec.dtype not in FP8_DTYPES:
        return None
    device = layer.selection.device
    capability = chosen.capability(device, DEFAULT_SELECTOR.inventory(device))
    return spec.dtype if capability.fp8_products else None


def _provider(layer: Attention, chosen: str) -> tuple[str, ...]:
    """Say which of several libraries' builds runs, where an implementation tells."""
    provider = getattr(layer.impl, "provider", None)
    return () if provider is None else (f"{chosen} runs {provider}",)


def _slow_features(layer: Attention, chosen: str) -> tuple[str, ...]:
    features = layer.selection.verdict(chosen).slow_features
    return tuple(f"declares a slow path for {feature}" for feature in features)


def libraries_of(selection: Selection) -> dict[str, str]:
    """Return the versions of the libraries that the chosen backend can use and that are here."""
    names = () if selection.backend is None else selection.backend.vendor_libraries
    inventory = DEFAULT_SELECTOR.inventory(selection.device) if names else Inventory()
    return {
        entry.name: entry.version
        for entry in inventory.entries
        if entry.name in names and entry.is_usable and entry.version is not None
    }
