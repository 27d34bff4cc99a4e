"""Twins whose builder is wrong: groups, fast builds, capture and replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_conformance.reference_backend import (
    REFERENCE_CAPABILITY,
    ReferenceBuilder,
    ReferenceCall,
    ReferenceImpl,
    ReferenceMetadata,
)
from attn_conformance.twins.twin import Twin
from attn_shared.backend import AttentionCGSupport
from attn_shared.capability import DeviceLimit
from attn_shared.device import Vendor
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import AttentionOptions, ReferenceResult
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["TWINS"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Planned(ReferenceMetadata):
    """A step with the scale of one layer in it."""

    scale: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Counted(ReferenceMetadata):
    """A step with its lengths as numbers."""

    lens: tuple[int, ...]


class FirstScaleForAll(Twin):
    """Plans with the first layer's scale, and runs every layer of the group by that plan."""

    breaks = ("groups",)

    class builder(ReferenceBuilder):
        def build(
            self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
        ) -> ReferenceMetadata:
            self.check(common_prefix_len, common)
            return _Planned(
                common=common, common_prefix_len=common_prefix_len, scale=self.layer.scale
            )

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options, metadata = super().options(call), call.metadata
            if not isinstance(metadata, _Planned):
                return options
            return replace(options, scale=metadata.scale)


class UsedUp(Twin):
    """Gives zeros from the second call on that one step's metadata serves."""

    breaks = ("metadata_reused",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            if getattr(self, "_last", None) is call.metadata:
                result.output[: result.num_tokens] = 0
            self._last = call.metadata
            return result


class FastBuildCutsCorners(Twin):
    """Leaves all causal masks out of a fast build."""

    breaks = ("fast_build",)

    class builder(ReferenceBuilder):
        def build(
            self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
        ) -> ReferenceMetadata:
            if fast_build:
                common = common.with_fields(causal=False, causal_cpu=None)
            return super().build(common_prefix_len, common)


class LevelAsNumber(Twin):
    """Declares its graph level as a bare number."""

    breaks = ("graph_level",)

    class builder(ReferenceBuilder):
        @classmethod
        def get_cudagraph_support(
            cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
        ) -> AttentionCGSupport:
            return 3  # type: ignore[return-value]


class LevelOfTheDay(Twin):
    """Declares another graph level each time it is asked."""

    breaks = ("graph_level",)

    class builder(ReferenceBuilder):
        asked = 0

        @classmethod
        def get_cudagraph_support(
            cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
        ) -> AttentionCGSupport:
            cls.asked += 1
            return AttentionCGSupport(cls.asked % 4)


class FreshTensors(Twin):
    """Copies the batch's lengths into a new tensor with every build."""

    breaks = ("capture_pointers",)

    class builder(ReferenceBuilder):
        def build(
            self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
        ) -> ReferenceMetadata:
            copied = common.with_fields(seq_lens=common.seq_lens.clone())
            return super().build(common_prefix_len, copied)


class FrozenLengths(Twin):
    """Reads lengths as numbers while it is captured, and replays with those."""

    breaks = ("replay",)

    class builder(ReferenceBuilder):
        def build(
            self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
        ) -> ReferenceMetadata:
            self.check(common_prefix_len, common)
            lens = tuple(common.seq_lens.tolist())
            return _Counted(common=common, common_prefix_len=common_prefix_len, lens=lens)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments, metadata = super().paged_arguments(call), call.metadata
            if isinstance(metadata, _Counted) and call.common.encoder_seq_lens is None:
                last = len(self.views(call).key) - 1
                table = arguments["block_table"].clamp(0, last)
                lens = torch.tensor(metadata.lens, dtype=torch.int32)
                arguments |= {"seq_lens": lens, "block_table": table}
            return arguments


class FrozenSinks(Twin):
    """Keeps a copy of the sinks of its first call."""

    breaks = ("replay",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            if options.sinks is None:
                return options
            self._sinks = getattr(self, "_sinks", options.sinks.clone())
            return replace(options, sinks=self._sinks)


class Synchronises(Twin):
    """Reads lengths back from the device in every call."""

    breaks = ("no_synchronisation",)
    raises = True
    needs_cuda = True
    served = replace(REFERENCE_CAPABILITY, devices=(DeviceLimit(vendor=Vendor.NVIDIA),))

    class impl(ReferenceImpl):
        def check_layer(self, spec: LayerSpec) -> None:
            return  # it would ask about a CPU

    class builder(ReferenceBuilder):
        def check(self, common_prefix_len: int, common: CommonAttentionMetadata) -> None:
            return


TWINS: tuple[type[Twin], ...] = (
    FirstScaleForAll,
    UsedUp,
    FastBuildCutsCorners,
    LevelAsNumber,
    LevelOfTheDay,
    FreshTensors,
    FrozenLengths,
    FrozenSinks,
    Synchronises,
)
