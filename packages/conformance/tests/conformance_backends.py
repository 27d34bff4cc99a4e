"""Backends that misbehave in one way each, for the tests of what runs them."""

from __future__ import annotations

import ctypes
import os
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
from attn_shared.capability import Support
from attn_shared.errors import InvalidInputError
from attn_shared.inventory import Inventory
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
