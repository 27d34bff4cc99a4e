"""Layers and batches held against a backend's capability: what selection refuses, so does this.

A backend's classes may be built by whoever holds a description, with no selection before it.
Implementations call `require_served` in their constructor and builders `require_batch_served` in
`build`, so that there is one gate, with one set of reasons.
"""

from __future__ import annotations

from torch import Tensor

from attn_shared.capability import Capability, Reason
from attn_shared.cascade import check_cascade
from attn_shared.device import DeviceFacts, preset
from attn_shared.errors import InvalidRequestError, MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, MLAAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.spec import LayerSpec
from attn_shared.tensor_checks import check_block_size

__all__ = ["request_of", "require_batch_served", "require_block_table", "require_served"]

_UNKNOWN = frozenset({"sparse", "phase"})
"""Codes of reasons on what a layer's description does not say."""


def request_of(spec: LayerSpec) -> AttentionRequest:
    """Return the request that a layer of this description makes.

    Raises:
        InvalidRequestError: a value that no backend may accept.
    """
    cache = spec.kv_cache_spec
    return AttentionRequest(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        kv_cache_dtype=(
            cache.kv_cache_dtype if isinstance(cache, AttentionSpec | MLAAttentionSpec) else "auto"
        ),
        block_size=None if cache is None else cache.block_size,
        kv_layout=cache.layout if isinstance(cache, AttentionSpec) else None,
        mla=spec.mla,
        has_sinks=spec.has_sinks,
        attn_type=spec.attn_type,
        window=spec.window,
        chunk_size=spec.chunk_size,
        softcap=spec.softcap,
        has_alibi=spec.has_alibi,
        batch_invariant=spec.batch_invariant,
        flash_attn_version=spec.flash_attn_version,
        dcp_size=spec.dcp_size,
        pcp_size=spec.pcp_size,
    )


def require_served(
    name: str, capability: Capability, spec: LayerSpec, device: DeviceFacts | None = None
) -> None:
    """Refuse a layer that the capability does not serve.

    Args:
        name: of the backend, for the message.
        capability: of the backend.
        spec: of the layer.
        device: where it runs; None, as in a constructor, which is not told: the device is then no
            reason to refuse, and rules see a CPU.

    Raises:
        InvalidRequestError: a value that no backend may accept, or a cache that is not the layer's.
        UnsupportedOptionError: with every reason.
    """
    request = request_of(spec)
    reasons = _reasons(capability, request, device)
    if reasons:
        raise UnsupportedOptionError(
            f"{name} does not serve this layer: {_joined(reasons)}.",
            hint="let attn_shared.select choose, or validate_configuration say so beforehand.",
        )
    if not request.is_cache_free:
        _require_own_cache(spec)


def require_batch_served(
    name: str,
    capability: Capability,
    spec: LayerSpec,
    common: CommonAttentionMetadata,
    common_prefix_len: int = 0,
) -> None:
    """Refuse a batch that asks what the capability does not serve and no layer's description says.

    A batch of plain causal rows costs a microsecond. Host lengths are for the builder to check,
    by `common.exact_seq_lens_cpu` where it needs them.

    Args:
        name: of the backend, for the message.
        capability: of the backend.
        spec: of a layer that reads the batch; layers that differ are asked one by one.
        common: the batch.
        common_prefix_len: as `build` was given it.

    Raises:
        MetadataError: a layer with a cache gets no block table, one for blocks of another size, or
            a prefix that the requests do not share; or the batch is one over sharded sequences.
        UnsupportedOptionError: with every reason.
    """
    is_cached = spec.attn_type not in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
    if is_cached:
        require_block_table(common)
        check_block_size(common.block_size, spec.kv_cache_spec)
    is_decoder = spec.attn_type is AttentionType.DECODER  # the others see every key anyway
    is_plain = common.causal is True or (common.causal is False and not is_decoder)
    _refuse_shares(common)
    if not is_plain or common.mm_prefix_ranges:
        _require_options(name, capability, spec, common)
    if common_prefix_len:
        _require_prefix(spec, common, common_prefix_len)


def require_block_table(common: CommonAttentionMetadata) -> Tensor:
    """Return the batch's block table (B, M).

    Raises:
        MetadataError: it has none.
    """
    if common.block_table is None:
        raise MetadataError.for_argument("block_table", None, "(num_reqs, M) int32")
    return common.block_table


def _reasons(
    capability: Capability, request: AttentionRequest, device: DeviceFacts | None
) -> list[Reason]:
    ignored = _UNKNOWN | {"device"} if device is None else _UNKNOWN
    found = capability.check(request, device or preset("genericcpu"))
    return [reason for reason in found if reason.code not in ignored]


def _joined(reasons: list[Reason]) -> str:
    return "; ".join(map(str, reasons))


def _require_own_cache(spec: LayerSpec) -> None:
    """Refuse a cache of other heads than the layer's, and one of another kind."""
    cache, kind = spec.kv_cache_spec, AttentionSpec if spec.mla is None else MLAAttentionSpec
    expected = {"head_size": spec.head_size}
    if spec.mla is None:
        expected |= {"num_kv_heads": spec.num_kv_heads, "head_size_v": spec.head_size_v}
    else:
        expected["kv_lora_rank"] = spec.mla.kv_lora_rank
    if not isinstance(cache, kind):
        raise InvalidRequestError.for_field(
            "kv_cache_spec", cache, f"an {kind.__name__} with attn_type={spec.attn_type}"
        )
    for field, size in expected.items():
        if getattr(cache, field) != size:
            raise InvalidRequestError.for_field(
                f"kv_cache_spec.{field}", getattr(cache, field), f"{size}, the layer's"
            )


def _require_options(
    name: str, capability: Capability, spec: LayerSpec, common: CommonAttentionMetadata
) -> None:
    """Ask the capability again, with the options of this step."""
    is_decoder = spec.attn_type is AttentionType.DECODER
    request = request_of(spec).with_options(
        non_causal=is_decoder and common.causal is False,
        per_request_causal=isinstance(common.causal, Tensor),
        use_mm_prefix=any(common.mm_prefix_ranges.values()),
    )
    reasons = _reasons(capability, request, None)
    if reasons:
        raise UnsupportedOptionError(
            f"{name} does not serve this batch: {_joined(reasons)}.",
            hint="say it in the request (non_causal, per_request_causal, use_mm_prefix), and "
            "selection finds who does.",
        )


def _refuse_shares(common: CommonAttentionMetadata) -> None:
    """A builder is given a rank's own keys as any others: their count is `seq_lens`."""
    if common.dcp_local_seq_lens is not None:
        raise MetadataError.for_argument(
            "dcp_local_seq_lens",
            "given",
            "None for a backend's builder, whose seq_lens count the keys that it is to read",
            hint="Attention with context_parallel= cuts a batch over sharded sequences.",
        )


def _require_prefix(
    spec: LayerSpec, common: CommonAttentionMetadata, common_prefix_len: int
) -> None:
    cache = spec.kv_cache_spec
    if cache is None or spec.attn_type is not AttentionType.DECODER:
        raise UnsupportedOptionError(
            f"common_prefix_len={common_prefix_len} with attn_type={spec.attn_type}; allowed: 0.",
            hint="cascade attention is for decoders.",
        )
    check_cascade(common, common_prefix_len, block_size=cache.block_size)
