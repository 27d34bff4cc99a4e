"""The backend class that vLLM asks, without vLLM's base class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from attn_shared.backend import AttentionBackend
from attn_shared.capability import Capability, Exactly, MultipleOf, Support
from attn_shared.dtypes import KVCacheLayout, kv_storage_dtype
from attn_shared.errors import AttnError
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.request import AttentionRequest, window_of
from attn_shared.selector import DEFAULT_SELECTOR, Selector
from attn_vllm.layers import choose

__all__ = ["BackendAdapter"]

_ANY_BACKEND_BLOCK = 16
"""Tokens that every first-party backend's blocks may be a multiple of; which backend a layer gets
under "auto" is known when the layer is built, and then checked against the block size."""


class BackendAdapter:
    """What vLLM asks of a class before it builds layers.

    With a named backend the answers are its capability's; with "auto" they are what some backend
    might serve, and each layer's own selection decides, at start-up as well.
    """

    forward_includes_kv_cache_update: ClassVar[bool] = False
    accept_output_buffer: ClassVar[bool] = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = []
    """Empty: vLLM then accepts any, and each layer's selection decides."""

    @classmethod
    def named_backend(cls) -> str | None:
        """Return the backend that was named; None is "auto"."""
        raise NotImplementedError  # the class that has vLLM's base has it

    @classmethod
    def device(cls) -> torch.device:
        """Return the torch device that vLLM runs on."""
        raise NotImplementedError

    @classmethod
    def engine_multiple_of(cls, base: int) -> Any:
        """Return vLLM's marker for any multiple of a block size."""
        raise NotImplementedError

    @classmethod
    def attn_capability(cls, selector: Selector = DEFAULT_SELECTOR) -> Capability | None:
        """Return what the named backend can do on this device; None with "auto"."""
        name = cls.named_backend()
        if name is None:
            return None
        facts = selector.device_facts(cls.device())
        backend: type[AttentionBackend] = selector.registry.load(name)
        return backend.capability(facts, selector.inventory(facts))

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Return the block sizes that the kernels take."""
        capability = cls.attn_capability()
        if capability is None:
            return [cls.engine_multiple_of(_ANY_BACKEND_BLOCK)]
        if capability.block_sizes == (1,):
            # Pages of few tokens are served, and slow; vLLM takes the least that is listed.
            return [cls.engine_multiple_of(_ANY_BACKEND_BLOCK)]
        listed = capability.block_sizes
        sizes = (size.size if isinstance(size, Exactly) else size for size in listed)
        return [
            cls.engine_multiple_of(size.base) if isinstance(size, MultipleOf) else size
            for size in sizes
        ]

    @classmethod
    def attn_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the cache layouts that are served, the preferred one first."""
        capability = cls.attn_capability()
        if capability is not None:
            return capability.kv_layouts
        selection, _ = choose(_PLAIN, cls.device(), None)
        return (selection.kv_layout or KVCacheLayout.NHD,)

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the logical shape of a layer's cache (vLLM 0.25.1 asks)."""
        spec = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            head_size_v=head_size,
            kv_cache_dtype=cache_dtype_str,
            dtype=kv_storage_dtype(cache_dtype_str, torch.bfloat16, torch.float8_e4m3fn),
        )
        return spec.shape(num_blocks)

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        """Return the cache's dimensions in memory, outermost first (vLLM 0.25.1 asks)."""
        if include_num_layers_dimension:
            raise NotImplementedError  # how vLLM is told that layers do not share one tensor
        is_head_major = cls.attn_layouts()[0] is KVCacheLayout.HND
        return (0, 1, 3, 2, 4) if is_head_major else (0, 1, 2, 3, 4)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Return the cache layout that `get_kv_cache_stride_order` follows (vLLM 0.25.1 asks)."""
        return str(cls.attn_layouts()[0])

    @classmethod
    def _serves(cls, feature: str) -> bool:
        capability = cls.attn_capability()
        return capability is None or getattr(capability, feature) is not Support.NO

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether heads of this width are served."""
        capability = cls.attn_capability()
        return capability is None or head_size in capability.head_sizes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Whether a cache of this format is served."""
        capability = cls.attn_capability()
        return capability is None or (kv_cache_dtype or "auto") in capability.kv_cache_dtypes

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether this kind of attention is served; cross-attention is not adapted."""
        name = str(getattr(attn_type, "value", attn_type))
        capability = cls.attn_capability()
        is_served = capability is None or name in {str(kind) for kind in capability.attn_types}
        return is_served and name != "encoder_decoder"

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether attention sinks are served."""
        return cls._serves("sinks")

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether sliding windows are served."""
        return cls._serves("window")

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether ranges of multimodal tokens that see each other are served."""
        return cls._serves("mm_prefix")

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether decoder rows may see keys to their right."""
        return cls._serves("non_causal")

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether results can be made independent of the batch."""
        return cls._serves("batch_invariant")

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Whether a cache's scales may be per head."""
        return cls._serves("per_head_quant_scales")

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Whether another party may read and write blocks."""
        return cls._serves("kv_connector")

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Return every reason to refuse what vLLM asks, in attn's words; empty means served.

        Args:
            asked: vLLM's selector configuration, by name.
        """
        try:
            choose(_request_of(asked), cls.device(), cls.named_backend())
        except AttnError as refusal:
            return [str(refusal)]
        return []


_PLAIN = AttentionRequest(num_heads=8, num_kv_heads=8, head_size=128)
"""A layer as most models have it, for what vLLM asks before it has one."""

_FLAGS = {
    "has_sink": "has_sinks",
    "use_mm_prefix": "use_mm_prefix",
    "use_per_head_quant_scales": "per_head_quant_scales",
    "use_non_causal": "non_causal",
    "use_batch_invariant": "batch_invariant",
    "use_kv_connector": "use_kv_connector",
    "use_sparse": "use_sparse",
}


def _request_of(asked: dict[str, Any]) -> AttentionRequest:
    """Return vLLM's selector configuration as a request; it has no counts of heads."""
    options: dict[str, Any] = {ours: True for theirs, ours in _FLAGS.items() if asked.get(theirs)}
    if asked.get("has_sliding_window"):
        options["window"] = window_of(1)  # of what width, vLLM does not say here
    attn_type: Any = asked.get("attn_type") or "decoder"
    return AttentionRequest(
        num_heads=1,
        num_kv_heads=1,
        head_size=asked["head_size"],
        dtype=asked["dtype"],
        kv_cache_dtype=asked.get("kv_cache_dtype") or "auto",
        block_size=asked.get("block_size"),
        attn_type=getattr(attn_type, "value", attn_type),
        dcp_size=2 if asked.get("use_dcp") else 1,
        pcp_size=2 if asked.get("use_pcp") else 1,
        **options,
    )
