"""What `Attention` is given: its arguments, and the batches that its kind of layer takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import SupportsIndex

import torch
from torch import Tensor

from attn_shared._overlap import is_self_overlapping
from attn_shared.checked import blocks_at_most, blocks_needed
from attn_shared.device import PRESETS
from attn_shared.errors import (
    InvalidInputError,
    InvalidRequestError,
    MetadataError,
    UnknownNameError,
)
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ranks import ContextParallel
from attn_shared.request import AttentionRequest, AttentionType, MLADims
from attn_shared.selection import Policy
from attn_shared.spec import BuildConfig

__all__ = [
    "blocks_bound",
    "check_batch_kind",
    "check_cache_size",
    "check_config",
    "check_lengths",
    "check_options",
    "check_places",
    "device_of",
    "dims_of",
    "group_sizes",
    "per_head",
    "policy_of",
]

_FROM_TENSORS = {"has_sinks": "sinks", "has_alibi": "alibi_slopes"}
"""Fields of the request that follow from a tensor, and the argument that it is."""

_DEVICES = "a torch device of this machine, such as 'cpu', 'cuda:0' or 'xpu'"


def check_options(options: Iterable[str], arguments: Iterable[str]) -> None:
    """Refuse options that are no fields of a request.

    Args:
        options: names that were passed beside the arguments.
        arguments: names of the arguments themselves, for the suggestion.

    Raises:
        UnknownNameError: suggests the nearest name.
        InvalidRequestError: the field follows from a tensor.
    """
    names = {field.name for field in fields(AttentionRequest)} - _FROM_TENSORS.keys()
    arguments = {*arguments}
    for name in options:
        if name in _FROM_TENSORS:
            argument = _FROM_TENSORS[name]
            if argument not in arguments:
                raise InvalidRequestError(f"{name} is not set: this layer takes no {argument}.")
            raise InvalidRequestError(
                f"{name} is not set by hand: it follows from {argument}.",
                hint=f"pass {argument}=, a tensor of one number per query head.",
            )
        if name not in names:
            raise UnknownNameError.for_name("option of Attention", name, names | arguments)


def device_of(device: object) -> torch.device:
    """Return the torch device of an argument.

    Raises:
        InvalidRequestError: torch has no such device.
    """
    hint = ""
    try:
        if isinstance(device, str | torch.device):
            return torch.device(device)
    except RuntimeError as error:
        if str(device).lower() in PRESETS:
            hint = "`attn select --device` answers for a preset; a layer runs where torch has one."
        raise InvalidRequestError.for_field("device", device, _DEVICES, hint=hint) from error
    raise InvalidRequestError.for_field("device", device, _DEVICES)


def dims_of(dims: object, options: Mapping[str, object]) -> MLADims:
    """Return the widths; refuse fields of a request that follow from them.

    Raises:
        InvalidRequestError: they are no `MLADims`, or such a field was passed.
    """
    if dims is not None and not isinstance(dims, MLADims):
        raise InvalidRequestError.for_field("dims", dims, "an MLADims, or None for DeepSeek's")
    for name in ("num_kv_heads", "head_size", "head_size_v", "mla"):
        if name in options:
            raise InvalidRequestError(
                f"{name}={options[name]} is not set by hand: it follows from dims.",
                hint="pass dims=MLADims(...).",
            )
    return dims or MLADims()


def policy_of(backend: object, name: str = "backend") -> Policy:
    """Return who named which backend; `name` is the argument's.

    Raises:
        InvalidRequestError: it is neither a name nor a policy.
    """
    if isinstance(backend, Policy):
        return backend
    if backend is not None and not isinstance(backend, str):
        raise InvalidRequestError.for_field(
            name, backend, f"a {name}'s name, a Policy, or None to let the selector choose"
        )
    return Policy(backend=backend)


def check_config(config: object) -> BuildConfig:
    """Return the bounds of the batches; None means the default ones.

    Raises:
        InvalidRequestError: it is something else.
    """
    if config is None:
        return BuildConfig()
    if not isinstance(config, BuildConfig):
        raise InvalidRequestError.for_field("config", config, "a BuildConfig, or None")
    return config


def group_sizes(
    place: object, options: Mapping[str, object]
) -> tuple[ContextParallel, dict[str, int]]:
    """Return the layer's place among ranks, and the sizes of its groups as fields of a request.

    Raises:
        InvalidRequestError: it is no `ContextParallel`, or a size is named that no group has.
    """
    if place is None:
        place = ContextParallel()
    if not isinstance(place, ContextParallel):
        raise InvalidRequestError.for_field(
            "context_parallel", place, "a ContextParallel, or None for whole sequences"
        )
    sizes = {"dcp_size": place.dcp_size, "pcp_size": place.pcp_size}
    for name, size in sizes.items():
        if options.get(name, size) != size:
            raise InvalidRequestError.for_field(
                name,
                options[name],
                f"{size}, the size of the group in context_parallel",
                hint="pass context_parallel=ContextParallel(...) with the process group.",
            )
    return place, sizes


def per_head(name: str, values: object, num_heads: int, device: torch.device) -> Tensor | None:
    """Return (Hq,) float32 on the device; looks at the contents, once.

    Raises:
        InvalidInputError: another shape or an integer dtype; NaN, or an infinity, but for a sink
            of -inf, which adds nothing to a denominator.
    """
    if values is None:
        return None
    if not isinstance(values, Tensor):
        raise InvalidInputError.for_argument(name, repr(values), f"a tensor ({num_heads},)")
    if tuple(values.shape) != (num_heads,):
        raise InvalidInputError.for_argument(
            f"{name} shape", tuple(values.shape), f"({num_heads},), one per query head of this rank"
        )
    if not values.is_floating_point():
        raise InvalidInputError.for_argument(f"{name} dtype", values.dtype, "a floating dtype")
    if values.device.type == "meta":
        raise InvalidInputError.for_argument(f"{name} device", "meta", "one that holds data")
    _check_finite(name, values.tolist(), may_be_minus_inf=name == "sinks")
    return values.to(device=device, dtype=torch.float32)


def _check_finite(name: str, values: list[float], *, may_be_minus_inf: bool) -> None:
    inf = float("inf")
    for index, value in enumerate(values):
        is_good = -inf < value < inf or (may_be_minus_inf and value == -inf)
        if not is_good:
            allowed = "a finite number or -inf" if may_be_minus_inf else "a finite number"
            raise InvalidInputError.for_argument(f"{name}[{index}]", value, allowed)


def check_batch_kind(common: object, request: AttentionRequest) -> None:
    """Refuse a batch with fields that this kind of layer would not read, or without what it needs.

    Raises:
        MetadataError: names the field and the layer's attn_type or dcp_size.
    """
    if not isinstance(common, CommonAttentionMetadata):
        raise MetadataError.for_argument(
            "common", f"a {type(common).__name__}", "a CommonAttentionMetadata"
        )
    kind = request.attn_type
    for name, hint in _UNREAD[kind].items():
        if getattr(common, name) is not None:
            raise MetadataError.for_argument(
                name, "given", f"None with attn_type={kind}, which does not read it", hint=hint
            )
    if request.dcp_size == 1:
        for name in ("dcp_local_seq_lens", "dcp_local_seq_lens_cpu"):
            if getattr(common, name) is not None:
                raise MetadataError.for_argument(
                    name, "given", "None with dcp_size=1, where one rank holds every key"
                )
    if kind is AttentionType.ENCODER_DECODER and common.encoder_seq_lens is None:
        raise MetadataError.for_argument(
            "encoder_seq_lens", None, f"(B,) int32, the keys of each request with attn_type={kind}"
        )


_CROSS_ONLY = "build the layer with attn_type=AttentionType.ENCODER_DECODER for cross-attention."
_FREE_ONLY = "keys of a paged layer come from its cache, whose lengths are seq_lens."
_NO_CACHE = "describe a batch without a cache."

_ENCODER_FIELDS = {"encoder_seq_lens": _CROSS_ONLY, "encoder_seq_lens_cpu": _CROSS_ONLY}
_KEY_FIELDS = {"key_start_loc": _FREE_ONLY, "key_start_loc_cpu": _FREE_ONLY}
_CACHE_FIELDS = {"block_table": _NO_CACHE, "slot_mapping": _NO_CACHE, "block_size": _NO_CACHE}

_UNREAD: Mapping[AttentionType, Mapping[str, str]] = {
    AttentionType.DECODER: {**_ENCODER_FIELDS, **_KEY_FIELDS},
    AttentionType.ENCODER: {**_ENCODER_FIELDS, **_CACHE_FIELDS},
    AttentionType.ENCODER_ONLY: {**_ENCODER_FIELDS, **_CACHE_FIELDS},
    AttentionType.ENCODER_DECODER: _KEY_FIELDS,
}
"""Fields of a batch that a kind of layer does not read, and what to do instead."""


def check_places(key: object, value: object, kv_cache: object, output: object, lse: object) -> None:
    """Refuse what is no dense tensor, and results whose elements share memory.

    Raises:
        InvalidInputError: names the argument, its value and what is allowed.
    """
    for name, tensor in (("key", key), ("value", value), ("kv_cache", kv_cache)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidInputError.for_argument(
                name, f"a {type(tensor).__name__}", "a tensor, or None"
            )
        if tensor.layout is not torch.strided:
            raise InvalidInputError.for_argument(f"{name} layout", tensor.layout, "torch.strided")
    for name, result in (("output", output), ("lse", lse)):
        if not isinstance(result, Tensor) or result.is_contiguous():
            continue
        if is_self_overlapping(result):
            raise InvalidInputError.for_argument(
                name,
                f"of strides {result.stride()} over shape {tuple(result.shape)}",
                "a tensor whose elements share no memory, since it is written",
            )


def blocks_bound(
    common: CommonAttentionMetadata, spec: KVCacheSpec | None, *, is_checked: bool
) -> int | None:
    """Return a bound on the blocks that a cache must have for a batch, where the host may look.

    Args:
        common: the batch.
        spec: the cache's format.
        is_checked: whether looking may wait for the device; on a CPU there is nothing to wait for.

    Raises:
        MetadataError: a block id that is read is negative.
    """
    if not is_checked and common.query_start_loc.device.type != "cpu":
        return None
    return blocks_at_most(common, spec)


def check_cache_size(
    kv_cache: Tensor | None,
    bound: int | None,
    common: CommonAttentionMetadata,
    spec: KVCacheSpec | None,
) -> None:
    """Refuse a cache that lacks a block which the batch names.

    Args:
        kv_cache: its first dimension counts blocks.
        bound: from `blocks_bound`: no block is looked at where the cache has so many.
        common: the batch.
        spec: the cache's format.

    Raises:
        InvalidInputError: it has fewer.
    """
    if kv_cache is None or bound is None or kv_cache.ndim == 0 or kv_cache.shape[0] >= bound:
        return
    least = blocks_needed(common, spec)
    if least is not None and kv_cache.shape[0] < least:
        raise InvalidInputError.for_argument(
            "kv_cache blocks",
            kv_cache.shape[0],
            f"at least {least}: the batch names block {least - 1}",
        )


def check_lengths(lengths: Sequence[int], query: object) -> None:
    """Refuse lengths of requests that are not those of the query's rows.

    Raises:
        InvalidInputError: the query is no tensor, a length is no integer >= 0, or they do not sum
            to the query's rows.
    """
    if not isinstance(query, Tensor) or not query.ndim:
        raise InvalidInputError.for_argument("query", f"a {type(query).__name__}", "a (T, Hq, D)")
    if isinstance(lengths, str) or not isinstance(lengths, Sequence):
        raise InvalidInputError.for_argument("lengths", repr(lengths), "a sequence of integers")
    for index, length in enumerate(lengths):
        if not isinstance(length, SupportsIndex) or int(length) < 0:
            raise InvalidInputError.for_argument(
                f"lengths[{index}]", repr(length), "an integer >= 0, the tokens of a request"
            )
    if sum(lengths) != query.shape[0]:
        raise InvalidInputError.for_argument(
            "sum of lengths", sum(lengths), f"{query.shape[0]}, the rows of query"
        )
