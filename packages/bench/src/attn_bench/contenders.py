"""What is timed: a backend of attn, or a direct call of something else on the same numbers."""

from __future__ import annotations

import logging
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from attn_bench.inputs import StepTensors, make_step
from attn_bench.workloads import Workload
from attn_shared.errors import AttnError, UnknownNameError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.kv_write import gather_rows
from attn_shared.layer import Attention

__all__ = [
    "PEERS",
    "BackendContender",
    "Contender",
    "Prepared",
    "SdpaContender",
    "contender_named",
    "refuse_silent_slow_path",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A contender with its inputs laid out.

    Attributes:
        calls: one call per copy of the inputs; they are timed in turn.
        plan: the host's work of a step; None where there is none.
        notes: what a reader of the figure must know.
    """

    calls: tuple[Callable[[], torch.Tensor], ...]
    plan: Callable[[], object] | None = None
    notes: tuple[str, ...] = ()


class Contender(ABC):
    """Something that can run a workload."""

    name: str

    @abstractmethod
    def prepare(self, workload: Workload, device: torch.device, num_copies: int) -> Prepared:
        """Lay out inputs and build what runs them.

        Raises:
            AttnError: it cannot run this workload; says why.
        """


class BackendContender(Contender):
    """A backend of attn, called through its implementation as an engine calls it."""

    def __init__(self, name: str) -> None:
        """Name the backend; "auto" lets the selector choose."""
        self.name = name

    def prepare(self, workload: Workload, device: torch.device, num_copies: int) -> Prepared:
        """Build the layer and `num_copies` filled caches."""
        layer = self._layer(workload, device)
        spec = layer.kv_cache_spec
        if not isinstance(spec, AttentionSpec):
            raise UnsupportedOptionError(f"{self.name} has no paged cache to read.")
        copies = [make_step(workload, spec, device, seed) for seed in range(num_copies)]
        plans = [layer.plan(copy.common) for copy in copies]
        calls = tuple(
            _forward(layer, copy, plan.metadata) for copy, plan in zip(copies, plans, strict=True)
        )
        verdict = layer.selection.verdict(layer.selection.chosen or self.name)
        notes = tuple(f"slow path for {feature}" for feature in verdict.slow_features)
        common = copies[0].common
        return Prepared(calls=calls, plan=lambda: layer.plan(common), notes=notes)

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
        )


def _forward(layer: Attention, copy: StepTensors, metadata: object) -> Callable[[], torch.Tensor]:
    """Return the backend's own call: the cache is written already, as before a decode's read."""

    def call() -> torch.Tensor:
        return layer.impl.forward(
            layer, copy.query, None, None, copy.kv_cache, metadata, copy.output
        )

    return call


class SdpaContender(Contender):
    """torch's SDPA on keys and values that lie dense already: no paging is paid for.

    Requests of unequal lengths are called one by one. Grouped-query heads go through enable_gqa, as
    a caller without attn would write it.
    """

    name = "torch.sdpa"

    def prepare(self, workload: Workload, device: torch.device, num_copies: int) -> Prepared:
        """Lay the same numbers out dense."""
        if workload.kv_cache_dtype != "auto":
            raise UnsupportedOptionError(
                f"torch.sdpa reads no quantised cache (kv_cache_dtype={workload.kv_cache_dtype})."
            )
        calls = tuple(self._calls(workload, device, seed) for seed in range(num_copies))
        return Prepared(calls=calls, notes=("keys and values lie dense; no paging is paid for",))

    def _calls(
        self, workload: Workload, device: torch.device, seed: int
    ) -> Callable[[], torch.Tensor]:
        parts = [
            dense_request(workload, request, device, seed) for request in range(workload.batch)
        ]
        if len(set(zip(workload.query_lens, workload.seq_lens, strict=True))) == 1:
            parts = [tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))]
        masks = [_mask(part[0].shape[2], part[1].shape[2], device) for part in parts]

        def call() -> torch.Tensor:
            output = torch.empty(0)
            for (query, key, value), (mask, is_causal) in zip(parts, masks, strict=True):
                output = torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=True
                )
            return output

        return call


def _mask(query_len: int, key_len: int, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """Return (attn_mask, is_causal) of a bottom-right causal call; torch's own is top-left."""
    if query_len == 1:
        return None, False
    if query_len == key_len:
        return None, True
    rows = torch.arange(query_len, device=device)[:, None] + key_len - query_len
    return torch.arange(key_len, device=device)[None, :] <= rows, False


def dense_request(
    workload: Workload, request: int, device: torch.device, seed: int
) -> tuple[torch.Tensor, ...]:
    """Return query (1, Hq, Tq, D), key and value (1, Hkv, Tk, D) of one request."""
    heads = workload.heads
    generator = torch.Generator(device).manual_seed(seed * 1009 + request)
    shapes = (
        (1, heads.num_heads, workload.query_lens[request], heads.head_size),
        (1, heads.num_kv_heads, workload.seq_lens[request], heads.head_size),
        (1, heads.num_kv_heads, workload.seq_lens[request], heads.head_size),
    )
    return tuple(
        torch.randn(shape, generator=generator, device=device).to(workload.dtype)
        for shape in shapes
    )


class GatheredSdpaContender(Contender):
    """torch's SDPA per request over gathered blocks: what a caller with a paged cache would write."""

    name = "torch.sdpa_gathered"

    def prepare(self, workload: Workload, device: torch.device, num_copies: int) -> Prepared:
        """Fill paged caches in the default layout."""
        if workload.kv_cache_dtype != "auto":
            raise UnsupportedOptionError("torch.sdpa_gathered reads no quantised cache.")
        heads = workload.heads
        spec = AttentionSpec(
            block_size=workload.block_size or 16,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            head_size_v=heads.head_size,
            dtype=workload.dtype,
        )
        copies = [make_step(workload, spec, device, seed) for seed in range(num_copies)]
        return Prepared(calls=tuple(_gathered_call(workload, spec, copy) for copy in copies))


def _gathered_call(
    workload: Workload, spec: AttentionSpec, copy: StepTensors
) -> Callable[[], torch.Tensor]:
    views, table = spec.split(copy.kv_cache), copy.common.block_table
    lengths = list(zip(workload.query_lens, workload.seq_lens, strict=True))
    masks = [_mask(q, k, copy.query.device) for q, k in lengths]
    if table is None:
        raise UnsupportedOptionError("torch.sdpa_gathered needs a block table.")

    def call() -> torch.Tensor:
        start = 0
        for request, ((query_len, seq_len), (mask, is_causal)) in enumerate(
            zip(lengths, masks, strict=True)
        ):
            rows = copy.query[start : start + query_len].transpose(0, 1).unsqueeze(0)
            key, value = (
                gather_rows(view, table[request], seq_len).transpose(0, 1).unsqueeze(0)
                for view in views[:2]
            )
            result = torch.nn.functional.scaled_dot_product_attention(
                rows, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=True
            )
            copy.output[start : start + query_len] = result[0].transpose(0, 1)
            start += query_len
        return copy.output

    return call


PEERS: dict[str, type[SdpaContender] | type[GatheredSdpaContender]] = {
    SdpaContender.name: SdpaContender,
    GatheredSdpaContender.name: GatheredSdpaContender,
}
"""Direct calls by name; every other name is a backend's."""


def contender_named(name: str) -> Contender:
    """Return a direct call of `PEERS`, or a backend.

    Raises:
        UnknownNameError: the name looks like a direct call's and is none.
    """
    if name in PEERS:
        return PEERS[name]()
    if "." in name:
        raise UnknownNameError.for_name("peer", name, PEERS)
    return BackendContender(name)


_SLOW_WORDS = re.compile(
    r"fall(?:s|ing)?[ -]?back|not compiled for|no kernel for|using (?:a )?(?:slow|reference)",
    re.IGNORECASE,
)


@contextmanager
def refuse_silent_slow_path(name: str) -> Iterator[None]:
    """Refuse to time a library that says, while it first runs, that it took a slow path.

    Vendors announce it by a warning or a log line only (Intel's XPU kernels, for one).

    Raises:
        UnsupportedOptionError: with the library's own words.
    """
    heard: list[str] = []
    listener = _Listener(heard)
    root = logging.getLogger()
    root.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        root.removeHandler(listener)
    heard += [str(warning.message) for warning in caught]
    slow = [words for words in heard if _SLOW_WORDS.search(words)]
    if slow:
        raise UnsupportedOptionError(
            f"{name} is not timed: its library took a slow path ({slow[0]!r})."
        )


class _Listener(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__(level=logging.WARNING)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.append(record.getMessage())


def first_call(contender: Contender, prepared: Prepared) -> None:
    """Run once, so that compilation and loading are not timed, and listen while it happens.

    Raises:
        AttnError: the contender cannot run the workload after all.
    """
    with refuse_silent_slow_path(contender.name):
        for call in prepared.calls:
            try:
                call()
            except AttnError:
                raise
            except Exception as error:
                raise UnsupportedOptionError(
                    f"{contender.name} failed on its first call: {type(error).__name__}: {error}"
                ) from error
