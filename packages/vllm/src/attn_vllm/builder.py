"""The metadata builder of one group of vLLM's layers, over the builders of attn's backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.errors import UnsupportedOptionError
from attn_shared.selector import DEFAULT_SELECTOR, Selector
from attn_shared.spec import BuildConfig, LayerSpec
from attn_vllm.batches import common_of
from attn_vllm.impl import Bound, ImplAdapter
from attn_vllm.steps import PlanKey, Step, plan_key

__all__ = ["BuilderAdapter", "Builders"]


class Builders:
    """One builder of attn's per kind of layer in a group.

    Attributes:
        by_key: the builders.
        block_size: tokens per block of the group's table; None for cache-free attention.
        reorder_batch_threshold: longest query that counts as a decode, where a backend needs
            decodes first; else None.
    """

    def __init__(
        self, bound: Mapping[str, Bound], config: BuildConfig, device: torch.device
    ) -> None:
        """Build them.

        Args:
            bound: layer name -> the layer, bound to its cache.
            config: bounds of the batches.
            device: where the kernels run.

        Raises:
            UnsupportedOptionError: the group has no layers of attn's.
        """
        if not bound:
            raise UnsupportedOptionError("a group of layers without one of attn's own was given.")
        grouped: dict[PlanKey, dict[str, LayerSpec]] = {}
        kinds: dict[PlanKey, Bound] = {}
        for name, layer in bound.items():
            key = plan_key(layer)
            grouped.setdefault(key, {})[name] = layer.spec
            kinds.setdefault(key, layer)
        self.by_key: dict[PlanKey, AttentionMetadataBuilder[Any]] = {
            key: kinds[key].selection.backend_cls.get_builder_cls()(
                kinds[key].cache, layers, config, device
            )
            for key, layers in grouped.items()
        }
        cache = next(iter(kinds.values())).cache
        self.block_size = None if cache is None else cache.block_size
        thresholds = [
            builder.reorder_batch_threshold or 1
            for builder in self.by_key.values()
            if builder.requires_ordered_batch
        ]
        self.reorder_batch_threshold = min(thresholds, default=None)

    def step(self, source: Any, *, has_exact_lengths: bool, how: str, **options: Any) -> Step:
        """Return the step that vLLM's batch describes.

        Args:
            source: vLLM's CommonAttentionMetadata.
            has_exact_lengths: see `common_of`.
            how: which method of the builders makes their metadata.
            options: that method's further arguments.
        """
        common = common_of(source, block_size=self.block_size, has_exact_lengths=has_exact_lengths)
        plans = {}
        for key, builder in self.by_key.items():
            if how == "build":
                plans[key] = builder.build(0, common, **options)
            else:
                plans[key] = getattr(builder, how)(common, **options)
        return Step(common, plans)


class BuilderAdapter:
    """The builder class that vLLM makes per group, without vLLM's base class."""

    supports_update_block_table = False
    reorder_batch_threshold: int | None = None

    def prepare(
        self, layers: Mapping[str, Any], block_size: int | None, device: torch.device
    ) -> None:
        """Bind the group's layers to their cache, and build what plans their steps.

        Args:
            layers: layer name -> vLLM's layer.
            block_size: tokens per block of the kernels' table; None for cache-free attention.
            device: where the kernels run.

        Raises:
            UnsupportedOptionError: a layer of the group is not run by attn.
            NoBackendError: nothing serves a layer with blocks of this size.
        """
        bound, facts = {}, None
        for name, layer in layers.items():
            impl = layer.impl
            if not isinstance(impl, ImplAdapter):
                raise UnsupportedOptionError(
                    f"{name} is run by {type(impl).__name__}, and shares a group with layers that "
                    "attn runs."
                )
            bound[name], facts = impl.bind(layer, block_size), impl.facts
        config = BuildConfig() if facts is None else facts.config
        self.has_exact_lengths = facts is None or not facts.has_spec_decode
        self.builders = Builders(bound, config, device)
        self.reorder_batch_threshold = self.builders.reorder_batch_threshold

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        """Return the step of vLLM's batch; a shared prefix is read as every other key is."""
        return self._step(common_attn_metadata, "build", fast_build=fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        """Return the step to capture a graph with."""
        return self._step(common_attn_metadata, "build_for_cudagraph_capture")

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Step:
        """Return the step of one draft of speculative decoding."""
        return self._step(common_attn_metadata, "build_for_drafting", draft_index=draft_index)

    def _step(self, source: Any, how: str, **options: Any) -> Step:
        return self.builders.step(
            source, has_exact_lengths=self.has_exact_lengths, how=how, **options
        )

    def use_cascade_attention(self, *_arguments: Any, **_options: Any) -> bool:
        """Return False: the batch that vLLM describes is planned whole."""
        return False

    @staticmethod
    def graph_level(
        backend: str | None, config: BuildConfig, selector: Selector = DEFAULT_SELECTOR
    ) -> AttentionCGSupport:
        """Return which batches may be captured.

        Args:
            backend: the one that was named; None is "auto", where it is not known which backend a
                layer gets: nothing may be captured then.
            config: bounds of the batches.
            selector: who knows the backends.
        """
        if backend is None:
            return AttentionCGSupport.NEVER
        builder = selector.registry.load(backend).get_builder_cls()
        level: AttentionCGSupport = builder.get_cudagraph_support(config, None)
        return level
