"""One layer of vLLM's, run by a backend of attn's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from attn_shared.backend import AttentionImpl
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.selection import Selection
from attn_shared.spec import LayerSpec
from attn_vllm.caches import view_cache
from attn_vllm.layers import LayerArguments, choose, describe, request_of
from attn_vllm.steps import Step

__all__ = ["CALLS", "Bound", "ImplAdapter", "LayerValues"]

CALLS: Counter[str] = Counter()
"""Layers run in this process, by backend: what shows that vLLM runs on attn."""


class LayerValues:
    """The numbers that a backend reads of its layer: an `attn_shared.backend.AttentionLayer`."""

    def __init__(self, layer: Any, arguments: LayerArguments, device: torch.device) -> None:
        """Read them once weights are loaded.

        Args:
            layer: vLLM's layer, whose scales are numbers on the host.
            arguments: what the layer was built from.
            device: where the kernels run.
        """
        self.q_scale: float | torch.Tensor = float(getattr(layer, "_q_scale_float", 1.0))
        self.k_scale: float | torch.Tensor = _scale(layer, "_k_scale")
        self.v_scale: float | torch.Tensor = _scale(layer, "_v_scale")
        self.sinks = _per_head(arguments.sinks, device)
        self.alibi_slopes = _per_head(arguments.alibi_slopes, device)


def _scale(layer: Any, name: str) -> float | torch.Tensor:
    """Return a scale: per head where the model has one per head, else the host's number."""
    tensor = getattr(layer, name, None)
    if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
        return tensor.to(torch.float32)
    return float(getattr(layer, f"{name}_float", 1.0))


def _per_head(values: Any, device: torch.device) -> torch.Tensor | None:
    if values is None:
        return None
    return torch.as_tensor(values, dtype=torch.float32, device=device).detach().contiguous()


class Bound:
    """A layer whose cache is known: the backend's implementation and what it was built from.

    Attributes:
        name: the backend that runs it.
        selection: why.
        spec: the layer's description.
        cache: the layer's cache; None for cache-free attention.
        impl: the backend's implementation.
    """

    def __init__(self, selection: Selection, spec: LayerSpec, cache: AttentionSpec | None) -> None:
        """Build the implementation.

        Raises:
            UnsupportedOptionError: the backend is not one of ordinary attention.
        """
        self.selection, self.spec, self.cache = selection, spec, cache
        self.name = str(selection.chosen)
        impl = selection.backend_cls.get_impl_cls()(spec)
        if not isinstance(impl, AttentionImpl):
            raise UnsupportedOptionError(
                f"{selection.chosen} runs latent attention, not the ordinary layers of this model."
            )
        self.impl: AttentionImpl[Any] = impl


class ImplAdapter:
    """The implementation class that vLLM builds per layer, without vLLM's base class.

    It selects when it is built, so that what nothing serves ends the start-up; the backend's own
    implementation follows when the size of cache blocks is settled (`bind`).
    """

    can_return_lse_for_decode = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Select a backend for the layer.

        Args: those of vLLM's AttentionImpl; see `LayerArguments`.

        Raises:
            NoBackendError: the named backend, or any, does not serve the layer.
            UnsupportedOptionError: the model asks for what attn has no word for.
        """
        self.arguments = LayerArguments(
            num_heads=num_heads,
            head_size=head_size,
            scale=scale,
            num_kv_heads=num_kv_heads,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=sinks,
            others=others,
        )
        # Names that vLLM's runner and models read of any implementation.
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.facts = self.engine_facts()
        request = request_of(self.arguments, self.facts)
        self.selection, self.device_facts = choose(request, self.facts.device, self.named_backend())
        self.bound: Bound | None = None
        self._values: LayerValues | None = None

    @classmethod
    def engine_facts(cls) -> Any:
        """Return the `EngineFacts` of the engine that is being built."""
        raise NotImplementedError  # the class that has vLLM's base has it

    @classmethod
    def named_backend(cls) -> str | None:
        """Return the backend that was named; None is "auto"."""
        raise NotImplementedError

    def bind(self, layer: Any, block_size: int | None) -> Bound:
        """Build the backend's implementation for blocks of this size.

        Args:
            layer: vLLM's layer, which knows the width of values and whether ranges of
                multimodal tokens see each other.
            block_size: tokens per block of the kernels' table; None for cache-free attention.

        Raises:
            NoBackendError: not with this block size.
        """
        request = request_of(
            self.arguments,
            self.facts,
            block_size=block_size,
            head_size_v=getattr(layer, "head_size_v", None),
            use_mm_prefix=bool(getattr(layer, "use_mm_prefix", False)),
        )
        self.selection, self.device_facts = choose(request, self.facts.device, self.named_backend())
        spec, cache = describe(self.selection, self.device_facts, self.arguments)
        self.bound = Bound(self.selection, spec, cache)
        return self.bound

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Forget numbers that were read before the weights were there."""
        self._values = None

    def values(self, layer: Any) -> LayerValues:
        """Return the layer's scales, sinks and slopes, read at its first call."""
        if self._values is None:
            self._values = LayerValues(layer, self.arguments, self.facts.device)
        return self._values

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            layer: vLLM's layer.
            query: (T, Hq, D).
            key: (T, Hkv, D), or None.
            value: (T, Hkv, Dv), or None.
            kv_cache: vLLM's cache tensor of this layer.
            attn_metadata: the step; None in a profiling run, whose output is zero.
            output: (T, Hq, Dv), written in place.
            output_scale: of a quantised output, which is not served.
            output_block_scale: likewise.

        Raises:
            UnsupportedOptionError: a quantised output is asked for.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedOptionError(
                "quantising the attention's output in its kernel (output_scale) is not served.",
                hint="switch off the fusion of attention and quantisation in vLLM.",
            )
        if attn_metadata is None:
            return output.zero_()
        bound = self._require_bound()
        cache = None if bound.cache is None else view_cache(kv_cache, bound.cache)
        CALLS[bound.name] += 1
        return bound.impl.forward(
            self.values(layer),
            query,
            key,
            value,
            cache,
            attn_metadata.metadata_of(bound),
            output,
        )

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys (T, Hkv, D) and values (T, Hkv, Dv) into their slots; -1 is not written."""
        bound = self._require_bound()
        if bound.cache is None:
            return  # cache-free attention keeps nothing
        cache, rows = view_cache(kv_cache, bound.cache), slot_mapping.shape[0]
        bound.impl.do_kv_cache_update(
            self.values(layer), key[:rows], value[:rows], cache, slot_mapping
        )

    def _require_bound(self) -> Bound:
        if self.bound is None:
            raise InvalidInputError.for_argument(
                "layer", "not yet bound to a cache", "one whose metadata builder exists"
            )
        return self.bound
