"""Tiny backends over two vendors' calls, right and wrong ones, for the tests of the stubs."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.reference_backend import (
    REFERENCE_CAPABILITY,
    ReferenceBackend,
    ReferenceCall,
    ReferenceImpl,
)
from attn_shared.capability import Capability, DeviceLimit, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.inventory import Inventory, VendorBuild, VendorSpec
from attn_shared.reference import ReferenceResult
from attn_shared.request import AttentionType

HALVES = frozenset({torch.float16, torch.bfloat16})
PLAIN = replace(
    REFERENCE_CAPABILITY,
    devices=(DeviceLimit(vendor=Vendor.NVIDIA), DeviceLimit(vendor=Vendor.CPU)),
    dtypes=HALVES,
    kv_cache_dtypes=frozenset({"auto"}),
    head_sizes_v=None,
    attn_types=frozenset({AttentionType.DECODER}),
    chunked_local=Support.NO,
    softcap=Support.NO,
    alibi=Support.NO,
    per_request_causal=Support.NO,
    mm_prefix=Support.NO,
    batch_invariant=Support.NO,
    per_head_quant_scales=Support.NO,
    rules=(),
)


def probe() -> VendorBuild:
    importlib.import_module("flash_attn_interface")
    return VendorBuild(version=importlib.metadata.version("tokenspeed-fa3"))


class FlashAttn3(ReferenceBackend):
    """flash_attn_with_kvcache of tokenspeed-fa3, called as it should be."""

    name = "TEST_FLASH_ATTN_3"
    vendor_libraries = ("flash_attn_3",)
    vendor_specs = (
        VendorSpec(
            name="flash_attn_3",
            distributions=("tokenspeed-fa3",),
            module="flash_attn_interface",
            install="pip install tokenspeed-fa3",
            probe="stubbed_backends:probe",
        ),
    )
    served = replace(
        PLAIN, head_sizes=SizeSet(minimum=8, maximum=256, multiple_of=8), sinks=Support.YES
    )

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        importlib.import_module("flash_attn_interface")

    class impl(ReferenceImpl):
        def attend_paged(self, call: ReferenceCall) -> ReferenceResult:
            interface = importlib.import_module("flash_attn_interface")
            common, views = call.common, self.views(call)
            left, right = (-1 if side is None else side for side in self.window())
            sinks = call.layer.sinks
            rounded = None if sinks is None else sinks.bfloat16()  # all that the kernel takes
            scale = self.spec.scale  # the kernel's is positive: the sign goes to the query
            query = call.query if scale > 0 else call.query * (-1.0 if scale < 0 else 0.0)
            out, lse, *_ = interface.flash_attn_with_kvcache(
                q=query,
                k_cache=views.key,
                v_cache=views.value,
                cache_seqlens=common.seq_lens,
                page_table=common.block_table,
                cu_seqlens_q=common.query_start_loc,
                max_seqlen_q=common.max_query_len,
                softmax_scale=abs(scale) or 1.0,
                causal=bool(common.causal),
                window_size=(left, right),
                sinks=rounded,
                return_softmax_lse=True,
            )
            if sinks is not None and rounded is not None:
                out, lse = corrected(out, lse, sinks[:, None], rounded.float()[:, None])
            return result_of(call, out, lse)

        def window(self) -> tuple[int | None, int | None]:
            return self.spec.window


def corrected(out: Tensor, lse: Tensor, sinks: Tensor, rounded: Tensor) -> tuple[Tensor, Tensor]:
    """Put right what a rounded sink does to output and LSE."""
    exact = lse + ((rounded - lse).exp() * (sinks - rounded).expm1()).log1p()
    exact = torch.where(lse == -math.inf, sinks, exact)
    return out * (lse - exact).exp().T[..., None], exact


def result_of(call: ReferenceCall, out: Tensor, lse: Tensor) -> ReferenceResult:
    count = call.common.num_actual_tokens
    return ReferenceResult(
        output=out.double(), lse=lse.double(), num_tokens=count, value_abs_max=0.0
    )


class FlashInfer(ReferenceBackend):
    """BatchPrefillWithPagedKVCacheWrapper, planned and run as it should be."""

    name = "TEST_FLASHINFER"
    served: Capability = replace(
        PLAIN,
        head_sizes=SizeSet.of(64, 128, 256, 512),
        sinks=Support.NO,
        two_sided_window=Support.NO,
        non_causal=Support.NO,
    )

    class impl(ReferenceImpl):
        base = math.log(2)  # of what the kernel returns

        def attend_paged(self, call: ReferenceCall) -> ReferenceResult:
            library = importlib.import_module("flashinfer")
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(8))
            self.plan(wrapper, call)
            views, count = self.views(call), call.common.num_actual_tokens
            # What is hidden is finite before the scale, so that the query takes the scale's sign.
            sign = (self.spec.scale > 0) - (self.spec.scale < 0)
            query = call.query[:count] * sign
            out, lse = wrapper.run(query, (views.key, views.value), return_lse=True)
            lse = lse.masked_fill(lse == -5e4, -math.inf)
            rows = torch.arange(count)
            padded = out.new_zeros((len(call.query), *out.shape[1:])).index_copy(0, rows, out)
            natural = lse.new_zeros((len(call.query), lse.shape[1])).index_copy(0, rows, lse)
            return result_of(call, padded, natural.T * self.base)

        def plan(self, wrapper: Any, call: ReferenceCall) -> None:
            common, size = call.common, self.views(call).key.shape[1]
            assert common.block_table is not None
            counts = (common.seq_lens + size - 1) // size
            starts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
            rows = [
                row[:count] for row, count in zip(common.block_table, counts.tolist(), strict=True)
            ]
            wrapper.plan(
                qo_indptr=common.query_start_loc,
                paged_kv_indptr=starts,
                paged_kv_indices=torch.cat([starts[:0], *rows]),
                paged_kv_last_page_len=(common.seq_lens - 1) % size + 1,
                num_qo_heads=self.spec.num_heads,
                num_kv_heads=self.spec.num_kv_heads,
                head_dim_qk=self.spec.head_size,
                page_size=size,
                causal=True,
                sm_scale=abs(self.spec.scale) or 1.0,
                window_left=-1 if self.spec.window[0] is None else self.spec.window[0],
                q_data_type=self.spec.dtype,
            )


class WindowOfW(FlashAttn3):
    """Passes the number of keys where the number beside the query's own is asked for."""

    class impl(FlashAttn3.impl):
        def window(self) -> tuple[int | None, int | None]:
            left, right = self.spec.window
            return (None if left is None else left + 1, right)


class LseInBits(FlashInfer):
    """Takes the kernel's LSE as it comes."""

    class impl(FlashInfer.impl):
        base = 1.0
