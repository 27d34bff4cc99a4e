"""The abstract classes of what runs one layer; `attn_shared.backend` says when each is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar, final

import torch

from attn_shared._mla_forward import gather_latents, prefill_rows
from attn_shared.errors import InvalidInputError, MLAForwardError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, MLAAttentionSpec
from attn_shared.kv_write import concat_and_cache_mla, write_kv
from attn_shared.merge import merge_into
from attn_shared.mla_metadata import require_mla_metadata
from attn_shared.spec import LayerSpec

__all__ = [
    "AttentionImpl",
    "AttentionImplBase",
    "AttentionLayer",
    "MLAAttentionImpl",
    "MLALayer",
    "SparseMLAAttentionImpl",
]

M = TypeVar("M")
"""A backend's own per-step metadata."""


class AttentionLayer(Protocol):
    """What an implementation reads of the layer that calls it.

    Attributes:
        q_scale, k_scale, v_scale: read back = stored * scale; a number or float32 (Hkv,).
        sinks: (Hq,) float32, or None.
        alibi_slopes: (Hq,) float32, or None.
    """

    q_scale: float | torch.Tensor
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None


class MLALayer(AttentionLayer, Protocol):
    """What an implementation of latent attention reads of the layer that calls it.

    Attributes:
        kv_b_proj: (H * (qk_nope_head_dim + v_head_dim), kv_lora_rank), the up-projection of the
            latent to each head's key and value; None where only `forward_mqa` is called.
    """

    kv_b_proj: torch.Tensor | None


class AttentionImplBase(ABC, Generic[M]):
    """Runs one layer.

    Attributes:
        can_return_lse: the `lse` argument is served; of the class, or of a layer where that depends
            on the device's kernels.

    Class attributes:
        lse_base_on_e: the returned LSE is a natural logarithm (False: log2).
        supports_pcp: prefill may be sharded over ranks.
        differentiates: the output carries right gradients to every tensor of a call that requires
            one; else `Attention` refuses such a call while gradients are on.
    """

    can_return_lse: bool = False
    lse_base_on_e: ClassVar[bool] = True
    supports_pcp: ClassVar[bool] = False
    differentiates: ClassVar[bool] = False

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description alone."""
        self.spec = spec


class AttentionImpl(AttentionImplBase[M]):
    """Runs one layer of ordinary attention.

    Attributes:
        write_kv: what writes the cache; another with the signature of `attn_shared.kv_write`'s may
            take its place, on the class or on one layer.
    """

    write_kv: Callable[..., None] = staticmethod(write_kv)

    def check_metadata(self, metadata: M) -> None:
        """Refuse a step that was not planned for such a layer.

        `Attention` asks before it writes the step's keys, so that a step of another layer changes
        no cache; `forward` refuses the same. It costs a look-up, not more.

        Args:
            metadata: what some builder returned.

        Raises:
            InvalidInputError: it is another backend's, or has nothing for layers of this kind.
        """

    def write_and_attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: M,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Do `do_kv_cache_update` and `forward` in one, or return None with nothing written.

        For a kernel that does both at less than the price of two calls: `Attention` asks it first.
        It must check all that they check before it writes anything. None leaves the call to the
        two, and to their words where it is refused; without an override that is every call.
        The arguments are theirs.
        """
        return None

    @final
    @classmethod
    def has_one_call(cls) -> bool:
        """Whether `write_and_attend` may stand for `do_kv_cache_update` and `forward`.

        A class that overrides one of the two and not the one means its own.
        """
        one, *both = (
            next(owner for owner in cls.__mro__ if name in owner.__dict__)
            for name in ("write_and_attend", "do_kv_cache_update", "forward", "check_metadata")
        )
        return one is not AttentionImpl and all(issubclass(one, owner) for owner in both)

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        metadata: M,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, and return the output.

        Never synchronises, and never branches on the value of a tensor.

        Args:
            layer: the calling layer: scales, sinks, slopes.
            query: (T, Hq, D); rows past query_start_loc[-1] are not read.
            key: (T, Hkv, D), this step's keys, or None where only the cache is read.
            value: (T, Hkv, Dv), or None.
            kv_cache: the layer's cache, None for cache-free attention.
            metadata: what the builder returned for this step.
            output: (T, Hq, Dv), written in place and returned; None returns the kernel's own.
            lse: (Hq, T) float32, written in place: natural logarithm of the denominator that the
                output was divided by.
        """

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values into their slots; -1 is not written.

        Args:
            layer: the calling layer: scales.
            key: (T, Hkv, D), of the layer's dtype.
            value: (T, Hkv, Dv), of the layer's dtype.
            kv_cache: the layer's cache.
            slot_mapping: (T,) int64.

        Raises:
            InvalidInputError: key, value or cache have another shape or dtype than the layer's.
            UnsupportedOptionError: the layer has no paged cache.
        """
        spec = self.spec.kv_cache_spec
        if not isinstance(spec, AttentionSpec):
            raise UnsupportedOptionError("this layer has no paged cache to write.")
        for name, rows in (("key", key), ("value", value)):
            if rows.dtype is not self.spec.dtype:
                raise InvalidInputError.for_argument(
                    f"{name} dtype", rows.dtype, f"{self.spec.dtype}, the layer's"
                )
        self.write_kv(
            kv_cache,
            spec,
            key,
            value,
            slot_mapping,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )


class MLAAttentionImpl(AttentionImplBase[M]):
    """Runs one layer of multi-head latent attention: there is no `forward`.

    A backend writes `forward_mqa`; `forward_mha` is the same for all and has the prefill that the
    builder chose attend. M is an `attn_shared.mla_metadata.MLAMetadata`.

    Class attributes:
        decode_type: what the backend's builder makes of decodes (`MLAMetadata.decode`).

    Attributes:
        write_latents: what writes entries; another of its signature may take its place.
        gather_latents: what reads earlier entries, likewise.
        merge_into: what merges chunks of keys, likewise.
    """

    decode_type: ClassVar[type[Any]] = object
    write_latents: Callable[..., None] = staticmethod(concat_and_cache_mla)
    gather_latents: Callable[..., torch.Tensor] = staticmethod(gather_latents)
    merge_into: Callable[..., None] = staticmethod(merge_into)

    def check_metadata(self, metadata: M) -> None:
        """Refuse a step that another backend planned, before it changes a cache.

        `MLAAttention` asks before it writes the step's latents, and `forward_mqa` refuses the same.

        Args:
            metadata: what some builder returned.

        Raises:
            InvalidInputError: it is no `MLAMetadata`, or its decodes are none of `decode_type`.
        """
        decode = require_mla_metadata(metadata).decode
        if decode is not None and not isinstance(decode, self.decode_type):
            raise InvalidInputError.for_argument(
                "metadata.decode",
                type(decode).__name__,
                f"a {self.decode_type.__name__}, which the builder of this layer's backend makes",
                hint="plan the step by the layer that runs it, or by one that was built alike.",
            )

    def forward_mha(
        self,
        layer: MLALayer,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: M,
        output: torch.Tensor,
        *,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Prefill with expanded heads; the cache holds the keys of earlier steps.

        All tensors but the cache have the rows of the step's prefills alone, which come behind
        its decodes. With an fp8 cache the step's own tokens are read as they are stored.

        Args:
            layer: the calling layer.
            query: (T, H, qk_nope_head_dim + qk_rope_head_dim).
            latent: (T, kv_lora_rank), this step's.
            rope: (T, qk_rope_head_dim), this step's.
            kv_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim).
            metadata: this step's.
            output: (T, H, v_head_dim), written in place.
            lse: (H, T) float32, natural logarithm, written in place.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
        """
        prefill_rows(self, layer, query, latent, rope, kv_cache, metadata, output, lse)

    @abstractmethod
    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: M,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode over the latent cache, which holds the step's own tokens as well.

        Rows past `metadata.num_decode_tokens` are not read, and what is written there is
        unspecified. A row whose request has seq_len 0 has output 0 and LSE -inf.

        Args:
            layer: the calling layer.
            query: (T, H, kv_lora_rank + qk_rope_head_dim), absorbed, any strides with a dense
                last dimension; T is at least `metadata.num_decode_tokens`.
            kv_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim).
            metadata: this step's.
            output: (T, H, kv_lora_rank), written in place and returned.
            lse: (H, T) float32, natural logarithm, written in place.
        """

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's latents (T, kv_lora_rank) and rope parts into their slots.

        `layer.k_scale` is the one scale of a quantised entry.
        """
        spec = self.spec.kv_cache_spec
        if not isinstance(spec, MLAAttentionSpec):
            raise UnsupportedOptionError("this layer has no latent cache to write.")
        self.write_latents(kv_cache, spec, latent, rope, slot_mapping, scale=layer.k_scale)

    @final
    @property
    def forward(self) -> NoReturn:
        """Refuse: MLA has two calls, not one.

        Raises:
            MLAForwardError: always (an AttributeError, so that hasattr answers False).
        """
        raise MLAForwardError(
            f"{type(self).__name__} has no forward: multi-head latent attention runs prefill and "
            "decode by different products.",
            hint="call forward_mha for prefill and forward_mqa for decode.",
        )


class SparseMLAAttentionImpl(MLAAttentionImpl[M]):
    """MLA over the keys that an indexer selected; decode-shaped calls only."""

    @abstractmethod
    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: M,
        output: torch.Tensor | None = None,
        *,
        topk_indices: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to `topk_indices` (T, topk) int32 slots, -1 where there is none."""

    def forward_mha(
        self,
        layer: MLALayer,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: M,
        output: torch.Tensor,
        *,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Refuse: a sparse backend prefills through forward_mqa as well.

        Raises:
            MLAForwardError: always.
        """
        raise MLAForwardError(
            f"{type(self).__name__} has no forward_mha.",
            hint="call forward_mqa with topk_indices for every phase.",
        )
