"""Backends that misbehave in one way each, for the tests of what runs them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from attn_conformance.reference_backend import (
    ReferenceBackend,
    ReferenceBuilder,
    ReferenceCall,
    ReferenceImpl,
)
from attn_shared.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)
from attn_shared.capability import Capability, DeviceLimit, SizeSet, Support
from attn_shared.device import Vendor
from attn_shared.errors import InvalidInputError
from attn_shared.inventory import Inventory
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import ReferenceResult
from attn_shared.spec import LayerSpec


class ByScaleImpl(ReferenceImpl):
    """Misbehaves in the cases of the rule `scale`, whose names begin with a shape and a number."""

    def attend(self, call: ReferenceCall) -> ReferenceResult:
        sys.stdout.write("what a library prints\n")
        if self.spec.scale == 0.05:
            ctypes.string_at(0)
        if self.spec.scale == 0.7:
            time.sleep(600)
        if self.spec.scale == -0.3:
            os._exit(3)
        if self.spec.scale == 0.0:
            raise KeyError("no such tile")
        return super().attend(call)


class ByScale(ReferenceBackend):
    name = "BY_SCALE"
    impl = ByScaleImpl


class WrongDtypeImpl(ReferenceImpl):
    def deliver(
        self, call: ReferenceCall, result: ReferenceResult, output: Any, lse: Any
    ) -> torch.Tensor:
        return super().deliver(call, result, output, lse).double()


class WrongDtype(ReferenceBackend):
    name = "WRONG_DTYPE"
    impl = WrongDtypeImpl


class WrongShapeImpl(ReferenceImpl):
    def deliver(
        self, call: ReferenceCall, result: ReferenceResult, output: Any, lse: Any
    ) -> torch.Tensor:
        return super().deliver(call, result, output, lse).flatten(1)


class WrongShape(ReferenceBackend):
    name = "WRONG_SHAPE"
    impl = WrongShapeImpl


class NoTensorImpl(ReferenceImpl):
    def deliver(self, call: ReferenceCall, result: ReferenceResult, output: Any, lse: Any) -> Any:
        return None


class NoTensor(ReferenceBackend):
    name = "NO_TENSOR"
    impl = NoTensorImpl


class WithoutSinks(ReferenceBackend):
    """Narrowed: serves no sinks, and says so."""

    name = "TORCH_SDPA"  # whose golden list promises them
    served = replace(ReferenceBackend.served, sinks=Support.NO)


class BrokenCapability(ReferenceBackend):
    name = "BROKEN_CAPABILITY"

    @classmethod
    def capability(cls, device: Any, inventory: Inventory) -> Any:
        raise RuntimeError("no driver")


class PickyImpl(ReferenceImpl):
    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        if spec.softcap is not None:
            raise ValueError("no softcap here")


class Picky(ReferenceBackend):
    """The capability says yes, the constructor no."""

    name = "PICKY"
    impl = PickyImpl


class DecodesFirstBuilder(ReferenceBuilder):
    requires_ordered_batch = True

    def check(self, common_prefix_len: int, common: Any) -> None:
        from attn_shared.batching import check_decodes_first

        check_decodes_first(common)
        super().check(common_prefix_len, common)


class DecodesFirst(ReferenceBackend):
    name = "DECODES_FIRST"
    builder = DecodesFirstBuilder


class WithoutLSEImpl(ReferenceImpl):
    can_return_lse = False

    def check_call(self, call: ReferenceCall, output: Any, lse: Any) -> None:
        super().check_call(call, output, lse)
        if lse is not None:
            raise InvalidInputError.for_argument("lse", tuple(lse.shape), "None")


class Blocks16(ReferenceBackend):
    """Takes little: one head size, one dtype, blocks of 16, one layout, and no LSE."""

    name = "BLOCKS_16"
    impl = WithoutLSEImpl
    served = replace(
        ReferenceBackend.served,
        dtypes=frozenset({torch.bfloat16}),
        head_sizes=type(ReferenceBackend.served.head_sizes).of(64),
        head_sizes_v=None,
        block_sizes=(16,),
        kv_layouts=ReferenceBackend.served.kv_layouts[:1],
        lse=Support.NO,
    )


class NotABackend:
    pass


class GraphedBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Every batch may be captured: `forward` reads shapes and what lies on the device."""

    @classmethod
    def get_cudagraph_support(cls, config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> CommonAttentionMetadata:
        return common


class GraphedImpl(AttentionImpl[CommonAttentionMetadata]):
    """Attends to everything that a table's width can hold, and masks."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: CommonAttentionMetadata,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        starts, lens, table = metadata.query_start_loc, metadata.seq_lens, metadata.block_table
        views = self.spec.kv_cache_spec.split(kv_cache)  # type: ignore[union-attr]
        rows = torch.arange(len(query), device=query.device, dtype=starts.dtype)
        request = torch.searchsorted(starts[1:], rows, right=True).clamp_max(len(lens) - 1)
        position = lens[request] - starts[request + 1] + rows
        size = views.key.shape[1]
        keys = torch.arange(table.shape[1] * size, device=query.device)  # type: ignore[union-attr]
        visible = keys <= position.unsqueeze(1)
        blocks = torch.where(visible, table[request][:, keys // size], 0)  # type: ignore[index]
        k, v = (
            torch.where(
                visible[..., None, None], view[blocks, keys % size].float(), 0
            ).repeat_interleave(self.spec.queries_per_kv, dim=2)
            for view in views[:2]
        )
        logits = torch.einsum("thd,tkhd->thk", query.float(), k) * self.spec.scale
        logits = logits.masked_fill(~visible.unsqueeze(1), -torch.inf)
        weights = logits.softmax(-1).nan_to_num()
        result = torch.einsum("thk,tkhd->thd", weights, v).to(query.dtype)
        return result if output is None else output.copy_(result)


class Graphed(AttentionBackend):
    """Plain causal attention that a CUDA graph can hold."""

    name = "GRAPHED"
    attn_api = ">=1,<2"

    @classmethod
    def capability(cls, device: Any, inventory: Inventory) -> Capability:
        return Capability(
            devices=(DeviceLimit(vendor=Vendor.CPU), DeviceLimit(vendor=Vendor.NVIDIA)),
            dtypes=frozenset({torch.float32}),
            head_sizes=SizeSet(),
            block_sizes=(1,),
        )

    @staticmethod
    def get_impl_cls() -> type[GraphedImpl]:
        return GraphedImpl

    @staticmethod
    def get_builder_cls() -> type[GraphedBuilder]:
        return GraphedBuilder


class StaleBuilder(GraphedBuilder):
    """Copies the block table, so that a replay reads the one that was captured."""

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> CommonAttentionMetadata:
        return common.with_fields(block_table=common.block_table.clone())  # type: ignore[union-attr]


class Stale(Graphed):
    name = "STALE"

    @staticmethod
    def get_builder_cls() -> type[GraphedBuilder]:
        return StaleBuilder


class CompilingImpl(ReferenceImpl):
    """Starts what takes longer than a case has, as a library that compiles at first use does."""

    def attend(self, call: ReferenceCall) -> ReferenceResult:
        subprocess.run([sys.executable, "-c", COMPILER], check=False)
        return super().attend(call)


class Compiling(ReferenceBackend):
    name = "COMPILING"
    impl = CompilingImpl

    @classmethod
    def kernel_compiler(cls) -> None:
        return None


COMPILER = "import time; time.sleep(300)  # attn_conformance's test of compilers that are left over"
