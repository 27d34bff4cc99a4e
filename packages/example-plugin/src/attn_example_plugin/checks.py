"""What is refused before anything is computed, each time by name.

Half of a backend's contract is to say no: what it was not built for is an error, and never
something else than was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from attn_shared.backend import AttentionLayer
from attn_shared.capability import Capability
from attn_shared.cascade import check_cascade
from attn_shared.device import preset
from attn_shared.errors import InvalidInputError, MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest
from attn_shared.spec import LayerSpec

__all__ = ["check_batch", "check_call", "check_layer"]

_OF_BOTH = {item.name for item in fields(AttentionRequest)} & {
    item.name for item in fields(LayerSpec)
}


def check_layer(name: str, capability: Capability, spec: LayerSpec) -> AttentionSpec:
    """Return the layer's cache format, after asking the capability what selection asks it.

    Raises:
        InvalidRequestError: a value that no backend may accept.
        UnsupportedOptionError: with every reason.
    """
    cache = spec.kv_cache_spec
    if not isinstance(cache, AttentionSpec):
        raise UnsupportedOptionError(f"{name} serves layers with a paged cache, not {cache}.")
    request = AttentionRequest(
        **{field: getattr(spec, field) for field in _OF_BOTH},
        kv_cache_dtype=cache.kv_cache_dtype,
        block_size=cache.block_size,
        kv_layout=cache.layout,
    )
    reasons = capability.check(request, preset("genericcpu"))
    if reasons:
        raise UnsupportedOptionError(
            f"{name} does not serve this layer: {'; '.join(map(str, reasons))}."
        )
    return cache


def check_batch(
    cache: KVCacheSpec | None, common_prefix_len: int, common: CommonAttentionMetadata
) -> Tensor:
    """Return the batch's block table, after refusing what `forward` would not see.

    Raises:
        UnsupportedOptionError: rows without a causal mask, or multimodal ranges.
        MetadataError: no block table, or a prefix that the requests do not share.
    """
    if common.causal is not True or any(common.mm_prefix_ranges.values()):
        raise UnsupportedOptionError("EXAMPLE_EAGER serves causal=True without mm_prefix_ranges.")
    if common.block_table is None or cache is None:
        raise MetadataError.for_argument("block_table", None, "(B, M) int32")
    # A shared prefix changes nothing here; one that is not shared would elsewhere.
    check_cascade(common, common_prefix_len, block_size=cache.block_size)
    return common.block_table


def check_call(
    spec: LayerSpec,
    layer: AttentionLayer,
    tensors: Mapping[str, Tensor | None],
    lse: Tensor | None,
    *,
    num_tokens: int,
) -> None:
    """Refuse arguments of `forward` that do not fit the layer; `split` checks the cache's shape.

    Raises:
        InvalidInputError: names the argument, its value and what is allowed.
        UnsupportedOptionError: what is handed over would be dropped.
    """
    heads = {"query": spec.num_heads, "output": spec.num_heads}
    widths = {"value": spec.head_size_v, "output": spec.head_size_v}
    for name, tensor in tensors.items():
        tail = (heads.get(name, spec.num_kv_heads), widths.get(name, spec.head_size))
        if tensor is not None and (tensor.shape[1:] != tail or tensor.dtype is not spec.dtype):
            _refuse(name, tensor, f"{spec.dtype} (T, {tail[0]}, {tail[1]})")
    query, output = tensors["query"], tensors["output"]
    if query is not None and len(query) < num_tokens:
        _refuse("query", query, f"at least {num_tokens} rows, the batch's tokens")
    if query is not None and output is not None and len(output) != len(query):
        _refuse("output", output, f"{len(query)} rows, as query")
    _check_layer_object(layer, lse)


def _refuse(name: str, tensor: Tensor, allowed: str) -> None:
    shape = tuple(tensor.shape)
    raise InvalidInputError.for_argument(name, f"{tensor.dtype} {shape}", allowed)


def _check_layer_object(layer: AttentionLayer, lse: Tensor | None) -> None:
    given = {"sinks": layer.sinks, "alibi_slopes": layer.alibi_slopes, "lse": lse}
    for name, tensor in given.items():
        if tensor is not None:
            raise UnsupportedOptionError(f"EXAMPLE_EAGER serves no {name}, and one is given.")
    for name, scale in (("k_scale", layer.k_scale), ("v_scale", layer.v_scale)):
        if bool((torch.as_tensor(scale) != 1).any()):
            raise InvalidInputError.for_argument(name, scale, "1: the cache is not quantised")
