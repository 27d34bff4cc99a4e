"""What one layer is (`LayerSpec`) and what its batches may look like (`BuildConfig`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import torch

from attn_shared._fields import FLOAT32_MOST, require_positive
from attn_shared.errors import InvalidRequestError, UnsupportedOptionError
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.request import AttentionRequest, AttentionType, MLADims, Window
from attn_shared.workspace import Workspace

if TYPE_CHECKING:
    from attn_shared.mla_prefill import MLAPrefill

__all__ = ["BuildConfig", "LayerSpec", "require_uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One attention layer, per rank; what an implementation is built from.

    Attributes:
        num_heads: query heads (Hq).
        num_kv_heads: key/value heads (Hkv).
        head_size: width of query and key heads (D).
        head_size_v: width of value heads (Dv).
        scale: factor on q.k, always explicit.
        dtype: dtype of query, key, value and output.
        kv_cache_spec: the cache that the layer reads; None for cache-free attention.
        window: visible keys (left, right) of the query's own position.
        chunk_size: chunked local attention.
        softcap: logits become softcap * tanh(logits / softcap); None is off.
        has_sinks: the layer object carries `sinks`.
        has_alibi: the layer object carries `alibi_slopes`.
        attn_type: who attends to what.
        kv_sharing_target: name of the layer whose cache this one reads; it then writes none.
        mla: widths of multi-head latent attention.
        batch_invariant: results must not depend on what shares the batch.
        flash_attn_version: the generation of FlashAttention that was named, or None.
        dcp_rank, dcp_size, pcp_rank, pcp_size: place in the context-parallel groups. An
            implementation attends to the keys that its batch describes, those of its own rank;
            `Attention` cuts the batch and combines the ranks.
        dcp_interleave: consecutive tokens that one rank holds.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    dtype: torch.dtype
    kv_cache_spec: KVCacheSpec | None = None
    window: Window = (None, None)
    chunk_size: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    kv_sharing_target: str | None = None
    mla: MLADims | None = None
    batch_invariant: bool = False
    flash_attn_version: int | None = None
    dcp_rank: int = 0
    dcp_size: int = 1
    dcp_interleave: int = 1
    pcp_rank: int = 0
    pcp_size: int = 1

    def __post_init__(self) -> None:
        """Refuse what no request can have refused before: the scale and the places in groups."""
        is_number = isinstance(self.scale, Real) and not isinstance(self.scale, bool)
        if not is_number or not abs(self.scale) <= FLOAT32_MOST:
            raise InvalidRequestError.for_field("scale", self.scale, "a finite number in float32")
        require_positive("dcp_interleave", self.dcp_interleave)
        for name, rank, size in (
            ("dcp_rank", self.dcp_rank, self.dcp_size),
            ("pcp_rank", self.pcp_rank, self.pcp_size),
        ):
            if not 0 <= rank < size:
                raise InvalidRequestError.for_field(name, rank, f"0 to {size - 1}")

    @classmethod
    def from_request(
        cls,
        request: AttentionRequest,
        *,
        scale: float,
        kv_cache_spec: KVCacheSpec | None = None,
        kv_sharing_target: str | None = None,
        dcp_rank: int = 0,
        dcp_interleave: int = 1,
        pcp_rank: int = 0,
    ) -> LayerSpec:
        """Describe the layer that made the request, with what the request does not hold.

        Raises:
            InvalidRequestError: the scale is not finite, or a rank is outside its group.
        """
        return cls(
            num_heads=request.num_heads,
            num_kv_heads=request.num_kv_heads,
            head_size=request.head_size,
            head_size_v=request.value_size,
            scale=scale,
            dtype=request.dtype,
            kv_cache_spec=kv_cache_spec,
            window=request.window,
            chunk_size=request.chunk_size,
            softcap=request.softcap,
            has_sinks=request.has_sinks,
            has_alibi=request.has_alibi,
            attn_type=request.attn_type,
            mla=request.mla,
            kv_sharing_target=kv_sharing_target,
            batch_invariant=request.batch_invariant,
            flash_attn_version=request.flash_attn_version,
            dcp_rank=dcp_rank,
            dcp_size=request.dcp_size,
            dcp_interleave=dcp_interleave,
            pcp_rank=pcp_rank,
            pcp_size=request.pcp_size,
        )

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """Bounds of the batches that a builder will see; nothing of it is read from a global.

    Attributes:
        max_num_seqs: most requests in one batch.
        max_num_tokens: most query tokens in one batch.
        max_model_len: longest sequence, in tokens.
        capture_sizes: padded batch sizes that graphs are captured for.
        num_spec_tokens: draft tokens per request and step.
        parallel_drafting: draft tokens come from one parallel pass.
        batch_invariant: results must not depend on what shares the batch.
        allows_fresh_kv: the step's new tokens may be read as they are handed over instead of as a
            quantised cache stores them, where a backend is quicker so. Results then depend on
            which tokens come in one step.
        checked: validate the contents of each batch (synchronises the device).
        workspace: scratch memory of this device and stream.
        mla_prefill: the class that prefills over latents; None: selected for the device.
        mla_workspace_bytes: most bytes of earlier keys and values, expanded to all heads, that a
            prefill over latents holds at once.
    """

    max_num_seqs: int = 256
    max_num_tokens: int = 8192
    max_model_len: int = 131072
    capture_sizes: tuple[int, ...] = ()
    num_spec_tokens: int = 0
    parallel_drafting: bool = False
    batch_invariant: bool = False
    allows_fresh_kv: bool = False
    checked: bool = False
    workspace: Workspace | None = None
    mla_prefill: type[MLAPrefill] | None = None
    mla_workspace_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        """Refuse bounds that are not positive."""
        for name in ("max_num_seqs", "max_num_tokens", "max_model_len", "mla_workspace_bytes"):
            require_positive(name, getattr(self, name))
        for size in self.capture_sizes:
            require_positive("capture_sizes", size)
        if self.num_spec_tokens != 0:
            require_positive("num_spec_tokens", self.num_spec_tokens)


def require_uniform(layers: Mapping[str, LayerSpec], fields: Iterable[str]) -> LayerSpec:
    """Return one layer of a group after checking that all agree on what one plan must share.

    Raises:
        UnsupportedOptionError: two layers disagree; names both with their values.
        InvalidRequestError: the group is empty.
    """
    if not layers:
        raise InvalidRequestError.for_field("layers", {}, "at least one layer")
    (first_name, first), *others = layers.items()
    for name, layer in others:
        for field in fields:
            ours, theirs = getattr(first, field), getattr(layer, field)
            if ours != theirs:
                raise UnsupportedOptionError(
                    f"layers of one group share one plan and must agree on {field}: "
                    f"{first_name} has {ours}, {name} has {theirs}.",
                    hint="put layers that differ into groups of their own.",
                )
    return first
