"""Latent attention, measured in its two parts: decodes over a cache, and prefills by a kernel.

A decode is what a backend's `forward_mqa` does with absorbed queries; a prefill is what an MLA
prefill does with the keys and values that latents were expanded to. The projections around both are
products of the model, the same for every backend, and are not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from attn_bench.contenders import Copy, Prepared, empty_lse, libraries_of
from attn_bench.graphs import rotation
from attn_bench.inputs import LayerTensors, Step, make_step, stored_keys_of
from attn_bench.workloads import Workload
from attn_shared.backend import MLAAttentionImpl
from attn_shared.errors import UnsupportedOptionError
from attn_shared.kv_cache import KVViews
from attn_shared.mla import MLAAttention
from attn_shared.mla_context import prefix_sums, ragged_part
from attn_shared.mla_metadata import RaggedPart
from attn_shared.mla_prefill import MLAPrefill, prefill_request
from attn_shared.registry import DEFAULT_REGISTRY, BackendKind
from attn_shared.request import AttentionRequest
from attn_shared.selection import Policy, Selection
from attn_shared.selector import DEFAULT_SELECTOR
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["prepare_latents"]


def prepare_latents(
    name: str, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
) -> Prepared:
    """Lay out a workload of latent attention.

    Args:
        name: of an MLA backend for decodes, of an MLA prefill for prefills, or "auto".
        workload: whose `heads.mla` is set.
        device: where it runs.
        num_copies: sets of inputs.
        is_captured: the calls go into a graph.

    Raises:
        UnsupportedOptionError: the name is of the other kind.
        NoBackendError: nothing of that name serves the layer.
    """
    kind: BackendKind = "attention" if workload.heads.is_latent else "mla_prefill"
    if name != "auto" and name not in DEFAULT_REGISTRY.names(kind):
        raise UnsupportedOptionError(
            f"{name} does not run {workload.phase} of {workload.heads}; allowed: "
            f"{', '.join(DEFAULT_REGISTRY.names(kind))}.",
            hint="MLA backends decode, and MLA prefills prefill: name one of each in two runs.",
        )
    if workload.heads.is_latent:
        return _decodes(name, workload, device, num_copies, is_captured)
    return _prefills(name, workload, device, num_copies)


def _config(workload: Workload) -> BuildConfig:
    return BuildConfig(
        max_num_seqs=workload.batch,
        max_num_tokens=workload.num_tokens,
        max_model_len=workload.context,
        capture_sizes=(workload.num_tokens,),
    )


def _decodes(
    name: str, workload: Workload, device: torch.device, num_copies: int, is_captured: bool
) -> Prepared:
    heads = workload.heads
    attn = MLAAttention(
        num_heads=heads.num_heads,
        scale=heads.softmax_scale,
        dims=heads.mla,
        dtype=workload.dtype,
        kv_cache_dtype=workload.kv_cache_dtype,
        block_size=workload.block_size,
        device=device,
        backend=name,
        needs_lse=workload.returns_lse,
        config=_config(workload),
    )
    step = make_step(workload, attn.kv_cache_spec, device, num_copies)
    plan = attn.plan_for_capture(step.common) if is_captured else attn.plan(step.common)
    metadata = plan.metadata
    if metadata.num_decode_tokens < workload.num_tokens:
        raise UnsupportedOptionError(
            f"{attn.selection.chosen} decodes {metadata.num_decode_tokens} of "
            f"{workload.num_tokens} rows of {workload.shape}, and would prefill the others."
        )
    chosen = attn.selection.chosen or name
    # What a first layer's call makes for all of a step, such as a schedule, is made once in a model
    # of many layers: every call of a graph is a layer of its own.
    num_layers = len(rotation(len(step.layers)))
    layers = [type(attn.impl)(attn.spec) for _ in range(num_layers)]
    return Prepared(
        name=chosen,
        copies=tuple(
            _decode_copy(attn, layers[index :: len(step.layers)], step, each, metadata, workload)
            for index, each in enumerate(step.layers)
        ),
        block_size=attn.kv_cache_spec.block_size,
        graph_level=attn.builder.get_cudagraph_support(attn.config, attn.kv_cache_spec),
        plan=lambda: attn.builder.build(0, step.common),
        notes=_notes(attn.selection, getattr(attn.impl, "provider", None)),
        libraries=libraries_of(attn.selection),
    )


def _decode_copy(
    attn: MLAAttention,
    layers: Sequence[MLAAttentionImpl[Any]],
    step: Step,
    layer: LayerTensors,
    metadata: Any,
    workload: Workload,
) -> Copy:
    output = None if workload.own_output else layer.output
    lse = empty_lse(layer.query) if workload.returns_lse else None
    turns = cycle(layers)

    def call() -> Tensor:
        impl = next(turns)
        return impl.forward_mqa(attn, layer.query, layer.kv_cache, metadata, output, lse=lse)

    return Copy(
        call=call,
        tokens=lambda output: output,
        query=lambda: layer.query,
        keys=lambda request: stored_keys_of(step, layer, request, workload.seq_lens[request]),
        lengths=workload.lengths,
        lse=None if lse is None else lambda output: lse,
        scale=workload.heads.softmax_scale,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Expanded:
    """One layer's expanded tokens: query and key (T, H, D), value (T, H, Dv) as a view."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def _prefills(name: str, workload: Workload, device: torch.device, num_copies: int) -> Prepared:
    heads, dims = workload.heads, workload.heads.mla
    if dims is None or workload.query_lens != workload.seq_lens:
        raise UnsupportedOptionError(
            f"a prefill of {heads} brings all of its keys, and {workload.shape} has earlier ones.",
            hint="measure prompts whose tokens are all new.",
        )
    request = AttentionRequest(
        num_heads=heads.num_heads,
        num_kv_heads=1,
        head_size=dims.latent_size,
        mla=dims,
        dtype=workload.dtype,
    )
    facts = DEFAULT_SELECTOR.device_facts(device)
    policy = Policy(backend=name)
    selection = DEFAULT_SELECTOR.resolve(
        prefill_request(request), facts, policy, kind="mla_prefill"
    )
    spec = LayerSpec.from_request(request, scale=heads.softmax_scale)
    kernel = selection.prefill_cls(spec, _config(workload), device)
    starts = prefix_sums(workload.query_lens)
    bare = ragged_part(starts, starts, device, is_causal=True)
    part = replace(bare, plan=kernel.prepare(bare))
    generator = torch.Generator(device).manual_seed(0)
    layers = [_expanded(workload, generator) for _ in range(num_copies)]
    return Prepared(
        name=selection.chosen or name,
        copies=tuple(_prefill_copy(kernel, part, each, workload) for each in layers),
        plan=lambda: kernel.prepare(bare),
        notes=_notes(selection, getattr(kernel, "provider", None)),
        libraries=libraries_of(selection),
    )


def _expanded(workload: Workload, generator: torch.Generator) -> _Expanded:
    """Return random tokens; the value lies behind the key's part, as a projection leaves it."""
    heads, device = workload.heads, generator.device
    dims = heads.mla
    nope = 0 if dims is None else dims.qk_nope_head_dim
    rows = (workload.num_tokens, heads.num_heads)

    def draw(width: int) -> Tensor:
        values = torch.randn((*rows, width), generator=generator, device=device)
        return values.to(workload.dtype)

    return _Expanded(
        query=draw(heads.head_size),
        key=draw(heads.head_size),
        value=draw(nope + heads.value_size)[..., nope:],
        output=torch.full(
            (*rows, heads.value_size), torch.nan, dtype=workload.dtype, device=device
        ),
    )


def _prefill_copy(
    kernel: MLAPrefill, part: RaggedPart, layer: _Expanded, workload: Workload
) -> Copy:
    starts = part.query_start_loc_cpu.tolist()

    def call() -> tuple[Tensor, Tensor | None]:
        return kernel.run(
            layer.query,
            layer.key,
            layer.value,
            part,
            output=None if workload.own_output else layer.output,
            returns_lse=workload.returns_lse,
        )

    def keys(request: int) -> KVViews:
        rows = slice(starts[request], starts[request + 1])
        return KVViews(layer.key[rows], layer.value[rows])

    return Copy(
        call=call,
        tokens=lambda result: result[0],
        query=lambda: layer.query,
        keys=keys,
        lengths=workload.lengths,
        lse=(lambda result: result[1]) if workload.returns_lse else None,
        scale=workload.heads.softmax_scale,
    )


def _notes(selection: Selection, provider: object) -> tuple[str, ...]:
    chosen = selection.chosen or ""
    slow = selection.verdict(chosen).slow_features
    runs = () if provider is None else (f"{chosen} runs {provider}",)
    return (*runs, *(f"declares a slow path for {feature}" for feature in slow))
