"""Twins that accept what they must refuse, or refuse what they must accept."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attn_conformance.reference_backend import (
    REFERENCE_CAPABILITY,
    ReferenceBuilder,
    ReferenceCall,
    ReferenceImpl,
    ReferenceMetadata,
)
from attn_conformance.twins.twin import Twin
from attn_shared.backend import AttentionLayer
from attn_shared.capability import MultipleOf, Support
from attn_shared.errors import UnsupportedOptionError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import AttentionOptions, ReferenceResult
from attn_shared.spec import LayerSpec

__all__ = ["TWINS"]


class _AnyLayer(ReferenceImpl):
    """Takes every layer."""

    def check_layer(self, spec: LayerSpec) -> None:
        return


class _AnyBatch(ReferenceBuilder):
    """Takes every batch."""

    def check(self, common_prefix_len: int, common: CommonAttentionMetadata) -> None:
        return


class RefusesWideHeads(Twin):
    """Says that it serves every head size, and builds no layer wider than 256."""

    breaks = ("construction",)

    class impl(ReferenceImpl):
        def check_layer(self, spec: LayerSpec) -> None:
            super().check_layer(spec)
            if spec.head_size > 256:
                raise UnsupportedOptionError("heads are at most 256 wide.")


class ForgetsItsLse(Twin):
    """Says in its capability that it returns the LSE, and in its class that it does not."""

    breaks = ("construction",)

    class impl(ReferenceImpl):
        can_return_lse = False


class RefusesEveryBatch(Twin):
    """Says that it serves everything, builds every layer, and refuses every batch."""

    breaks = ("causal", "gqa", "generated")
    raises = True

    class builder(ReferenceBuilder):
        def check(self, common_prefix_len: int, common: CommonAttentionMetadata) -> None:
            raise UnsupportedOptionError("this batch is not served.")


class DropsUndeclaredSinks(Twin):
    """Does not serve sinks, accepts a layer that has them, and drops them."""

    breaks = ("unsupported_option",)
    served = replace(REFERENCE_CAPABILITY, sinks=Support.NO)
    builder = _AnyBatch

    class impl(_AnyLayer):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            return replace(super().options(call), sinks=None)


class DropsUndeclaredWindow(Twin):
    """Does not serve windows, accepts a layer that has one, and drops it."""

    breaks = ("unsupported_option",)
    served = replace(REFERENCE_CAPABILITY, window=Support.NO, two_sided_window=Support.NO)
    builder = _AnyBatch

    class impl(_AnyLayer):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            return replace(super().options(call), window=(None, None))


class AcceptsUndeclaredBlocks(Twin):
    """Serves blocks of multiples of 16 only, and takes any."""

    breaks = ("unsupported_option",)
    served = replace(REFERENCE_CAPABILITY, block_sizes=(MultipleOf(16),))
    builder = _AnyBatch
    impl = _AnyLayer


class AcceptsUndeclaredBatches(Twin):
    """Serves causal batches only, refuses no batch, and takes every batch for causal."""

    breaks = ("unsupported_option",)
    served = replace(
        REFERENCE_CAPABILITY,
        non_causal=Support.NO,
        per_request_causal=Support.NO,
        mm_prefix=Support.NO,
    )

    class builder(_AnyBatch):
        def build(
            self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
        ) -> ReferenceMetadata:
            plain = common.with_fields(causal=True, causal_cpu=None, mm_prefix_ranges={})
            return super().build(common_prefix_len, plain, fast_build)


class AcceptsAnyLayer(Twin):
    """Builds a layer without a look at its values."""

    breaks = ("malformed_layer",)
    impl = _AnyLayer


class SoftcapOfZeroIsOff(Twin):
    """Takes a softcap of 0 for none, as calls do that write "off" as 0."""

    breaks = ("malformed_layer",)

    class impl(ReferenceImpl):
        def check_layer(self, spec: LayerSpec) -> None:
            super().check_layer(replace(spec, softcap=spec.softcap or None))


class AcceptsAnyCall(Twin):
    """Computes without a look at shapes and dtypes."""

    breaks = ("wrong_input",)

    class impl(ReferenceImpl):
        def check_call(
            self, call: ReferenceCall, output: Tensor | None, lse: Tensor | None
        ) -> None:
            return


class WritesBeforeItLooks(Twin):
    """Refuses another backend's step in `forward` alone, when the cache is already changed."""

    breaks = ("wrong_input",)

    class impl(ReferenceImpl):
        def forward(
            self,
            layer: AttentionLayer,
            query: Tensor,
            key: Tensor | None,
            value: Tensor | None,
            kv_cache: Tensor | None,
            metadata: ReferenceMetadata,
            output: Tensor | None = None,
            *,
            lse: Tensor | None = None,
        ) -> Tensor:
            super().check_metadata(metadata)
            return super().forward(layer, query, key, value, kv_cache, metadata, output, lse=lse)

        def check_metadata(self, metadata: ReferenceMetadata) -> None:
            return


class CastsAnyQuery(Twin):
    """Casts a query of another dtype to its own."""

    breaks = ("wrong_input",)

    class impl(ReferenceImpl):
        def check_call(
            self, call: ReferenceCall, output: Tensor | None, lse: Tensor | None
        ) -> None:
            cast = replace(call, query=call.query.to(self.spec.dtype))
            super().check_call(cast, output, lse)


class WordlessRefusal(Twin):
    """Refuses wrong input without saying what is wrong."""

    breaks = ("wrong_input",)

    class impl(ReferenceImpl):
        def check_call(
            self, call: ReferenceCall, output: Tensor | None, lse: Tensor | None
        ) -> None:
            try:
                super().check_call(call, output, lse)
            except ValueError:
                raise ValueError("invalid argument") from None


class IgnoresLse(Twin):
    """Returns no LSE, and does not refuse to be asked for one."""

    breaks = ("wrong_input",)
    served = replace(REFERENCE_CAPABILITY, lse=Support.NO)

    class impl(ReferenceImpl):
        can_return_lse = False

        def deliver(
            self,
            call: ReferenceCall,
            result: ReferenceResult,
            output: Tensor | None,
            lse: Tensor | None,
        ) -> Tensor:
            return super().deliver(call, result, output, None)


class FailsLate(Twin):
    """Finds a missing cache only when it computes, as a kernel's launch does."""

    breaks = ("wrong_input",)

    class impl(ReferenceImpl):
        def check_call(
            self, call: ReferenceCall, output: Tensor | None, lse: Tensor | None
        ) -> None:
            if call.kv_cache is None and self.spec.kv_cache_spec is not None:
                raise RuntimeError("illegal memory access")
            super().check_call(call, output, lse)


TWINS: tuple[type[Twin], ...] = (
    RefusesWideHeads,
    ForgetsItsLse,
    RefusesEveryBatch,
    DropsUndeclaredSinks,
    DropsUndeclaredWindow,
    AcceptsUndeclaredBlocks,
    AcceptsUndeclaredBatches,
    AcceptsAnyLayer,
    SoftcapOfZeroIsOff,
    AcceptsAnyCall,
    WritesBeforeItLooks,
    CastsAnyQuery,
    WordlessRefusal,
    IgnoresLse,
    FailsLate,
)
