"""FlashInfer's calls of trtllm-gen and XQA: a table of blocks, two factors, and no plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.attend import KernelCall, LseForm, NotComputedError
from attn_conformance.stubs.checks import (
    Limits,
    check_indices,
    check_kernel_call,
    check_output,
    refuse_unless,
)
from attn_conformance.stubs.planned import check_computed
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature
from attn_shared.nvfp4 import dequantize_nvfp4

__all__ = ["TrtllmCall"]

Arguments = Mapping[str, Any]

_XQA_PAGES = (16, 32, 64, 128)
_XQA_SEMAPHORES = 8 * 2**20
_GEN_PAGES = (16, 32, 64, 128, 256, 512, 1024)
_LIMITS = Limits(
    cache_dtypes=(torch.float8_e4m3fn,), head_size_multiple=16, head_size_max=256, page_multiple=16
)
_GEN_LIMITS = replace(_LIMITS, dtypes=(*_LIMITS.dtypes, torch.float8_e4m3fn))
_KNOWN = frozenset(
    {"bmm1_scale", "bmm2_scale", "window_left", "out", "sinks", "kv_layout", "backend", "causal"}
    | {"q_len_per_req", "lse", "return_lse", "enable_pdl", "kv_cache_sf"}
)


@dataclass(frozen=True, kw_only=True)
class TrtllmCall:
    """One of the two calls.

    Attributes:
        signature: its parameters.
        lse: how it writes the LSE.
    """

    signature: VendorSignature
    lse: LseForm

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for the function; its calls go to the recorder."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.answer(recorder.record(self.signature, arguments, keywords))

        call.__name__ = call.__qualname__ = self.signature.name
        call.__signature__ = self.signature.signature  # type: ignore[attr-defined]
        return call

    def answer(self, arguments: Arguments) -> Any:
        """Refuse what the real function refuses, and compute the rest."""
        check_computed(self.signature, arguments, _KNOWN)
        name = self.signature.name
        kernels = self._kernels(arguments)
        call = self._kernel_call(arguments)
        check_kernel_call(name, call, _LIMITS if kernels == "xqa" else _GEN_LIMITS)
        size, pages = call.key.shape[1], _XQA_PAGES if kernels == "xqa" else _GEN_PAGES
        refuse_unless(size in pages, name, f"page_size {size} is none of {pages}")
        if kernels == "xqa":
            self._check_xqa(arguments)
        result = call.attend()
        target, exact = arguments["out"], result.output
        if arguments["kv_cache_sf"] is not None:
            exact = exact * float(arguments["bmm2_scale"])
        output = exact.to(call.output_dtype if target is None else target.dtype)
        if target is not None:
            check_output(name, "out", target, tuple(output.shape), output.dtype)
            refuse_unless(target.is_contiguous(), name, "out must be contiguous")
            output = target.copy_(output)
        if not arguments["return_lse"]:
            return output
        return output, call.lse(result, self.lse)

    def _kernels(self, arguments: Arguments) -> str:
        """Return the kernels by name; "auto" asks the device, which is not here."""
        found = str(arguments.get("backend", "trtllm-gen"))
        if found not in ("xqa", "trtllm-gen"):
            raise NotComputedError(f"{self.signature.name}: backend={found!r} is not computed")
        return found

    def _check_xqa(self, arguments: Arguments) -> None:
        name = self.signature.name
        if arguments["return_lse"] or arguments["lse"] is not None:
            raise NotImplementedError("xqa backend does not support return_lse/lse output")
        scratch = arguments["workspace_buffer"]
        refuse_unless(scratch.numel() > _XQA_SEMAPHORES, name, "the workspace holds no scratch")
        refuse_unless(not bool(scratch[:4096].any()), name, "semaphores are not zero")
        for part in arguments["kv_cache"]:
            words = f"pages are {part.stride(0)} elements apart, no number of heads"
            refuse_unless(part.stride(0) % part.shape[-1] == 0, name, words)
        if arguments["q_len_per_req"] != 1:
            raise NotComputedError(f"{name}: q_len_per_req with xqa is not computed")

    def _kernel_call(self, arguments: Arguments) -> KernelCall:
        name, query = self.signature.name, arguments["query"]
        table, lens = arguments["block_tables"], arguments["seq_lens"]
        check_indices(name, "block_tables", table, (None, None))
        refuse_unless(table.is_contiguous(), name, "block_tables must be contiguous")
        check_indices(name, "seq_lens", lens, (len(table),))
        key, value = arguments["kv_cache"]
        left = arguments["window_left"]
        value_factor = float(arguments["bmm2_scale"])
        if key.dtype is torch.uint8:
            key, value = self._widened(arguments)
            query, value_factor = query.to(torch.bfloat16), 1.0
        if arguments["kv_layout"] == "HND":
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        if key.dtype.itemsize > 1 and value_factor != 1.0:
            raise NotComputedError(f"{name}: bmm2_scale of a cache that is not fp8 is not computed")
        return KernelCall(
            query=query,
            key=key,
            value=value,
            query_starts=self._query_starts(arguments, len(table)),
            key_lens=lens,
            block_table=table,
            scale=float(arguments["bmm1_scale"]),
            is_causal=bool(arguments.get("causal", True)),
            window=(None if left < 0 else int(left), None),
            sinks=arguments["sinks"],
            descales=(1.0, 1.0, value_factor),
        )

    def _widened(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """Return a cache of 4 bits, heads first, as bfloat16, which holds each of its products."""
        name, scales = self.signature.name, arguments["kv_cache_sf"]
        refuse_unless(scales is not None, name, "kv_cache_sf must be provided for NVFP4 KV cache")
        refuse_unless(arguments["kv_layout"] == "HND", name, "NVFP4 in NHD is copied at each call")
        query = arguments["query"]
        refuse_unless(query.dtype is torch.float8_e4m3fn, name, "NVFP4 takes fp8 queries")
        parts = []
        for packed, factors in zip(arguments["kv_cache"], scales, strict=True):
            in_rows = factors.stride()[-2:] == (factors.shape[-1], 1)
            refuse_unless(in_rows, name, "the scales of a page and head must lie in a row")
            parts.append(dequantize_nvfp4(packed, factors, 1.0, torch.bfloat16))
        return parts[0], parts[1]

    def _query_starts(self, arguments: Arguments, count: int) -> Tensor:
        name = self.signature.name
        if "batch_size" in arguments:
            starts: Tensor = arguments["cum_seq_lens_q"]
            check_indices(name, "cum_seq_lens_q", starts, (count + 1,))
            check_indices(name, "cum_seq_lens_kv", arguments["cum_seq_lens_kv"], (count + 1,))
            refuse_unless(arguments["batch_size"] == count, name, "batch_size is another")
            longest = int(starts.diff().max()) if count else 0
            refuse_unless(arguments["max_q_len"] >= longest, name, "max_q_len is too small")
            return starts
        each = int(arguments["q_len_per_req"])
        rows = len(arguments["query"])
        refuse_unless(rows == each * count, name, f"query has {rows} rows for {count} requests")
        return torch.arange(count + 1, dtype=torch.int32) * each
