"""CUTLASS's decode over latents in vLLM 0.25.1, by its operators' schemas; not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attn_conformance.stubs.attend import KernelCall, LseForm
from attn_conformance.stubs.checks import (
    Limits,
    check_indices,
    check_kernel_call,
    check_output,
    refuse_unless,
)
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.opaque import OpaqueFunction
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature

__all__ = ["VLLM_CUTLASS_MLA"]

_NAME = "sm100_cutlass_mla_decode"
_HEADS, _PAGE, _LATENT, _ROPE = 128, 128, 512, 64
_LIMITS = Limits(head_size_multiple=64, head_size_max=576, page_multiple=_PAGE)
_LSE = LseForm(layout="TH")


@dataclass(frozen=True, kw_only=True)
class _Decode:
    """The operator, which writes out and, if it has room for it, lse."""

    signature: VendorSignature

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for it; its calls go to the recorder."""

        def call(*arguments: Any, **keywords: Any) -> None:
            self.answer(recorder.record(self.signature, arguments, keywords))

        call.__name__ = call.__qualname__ = _NAME
        call.__signature__ = self.signature.signature  # type: ignore[attr-defined]
        return call

    def answer(self, arguments: Mapping[str, Any]) -> None:
        """Refuse what the kernel does not take, and compute the rest."""
        nope, rope, cache = (arguments[n] for n in ("q_nope", "q_pe", "kv_c_and_k_pe_cache"))
        table, lens = arguments["page_table"], arguments["seq_lens"]
        count = len(nope)
        for name, tensor, width in (("q_nope", nope, _LATENT), ("q_pe", rope, _ROPE)):
            shape = (count, _HEADS, width)
            words = f"{name} must be {shape}, not {tuple(tensor.shape)}"
            refuse_unless(tuple(tensor.shape) == shape and tensor.is_contiguous(), _NAME, words)
        words = f"the cache must be (pages, {_PAGE}, 576), not {tuple(cache.shape)}"
        refuse_unless(tuple(cache.shape[1:]) == (_PAGE, _LATENT + _ROPE), _NAME, words)
        check_indices(_NAME, "seq_lens", lens, (count,))
        check_indices(_NAME, "page_table", table, (count, None))
        words = "workspace must be uint8, and not empty"
        refuse_unless(arguments["workspace"].dtype is torch.uint8, _NAME, words)
        key = cache.unsqueeze(2)
        call = KernelCall(
            query=torch.cat((nope, rope), -1),
            key=key,
            value=key[..., :_LATENT],
            query_starts=torch.arange(count + 1, dtype=torch.int32),
            key_lens=lens,
            block_table=table,
            scale=float(arguments["scale"]),
            is_causal=True,
        )
        check_kernel_call(_NAME, call, _LIMITS)
        result = call.attend()
        out, lse = arguments["out"], arguments["lse"]
        check_output(_NAME, "out", out, (count, _HEADS, _LATENT), nope.dtype)
        out.copy_(result.output)
        if lse.numel():
            check_output(_NAME, "lse", lse, (count, _HEADS), torch.float32)
            lse.copy_(call.lse(result, _LSE))


_SIGNATURE = VendorSignature(
    name=_NAME,
    parameters=(
        "out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, scale, "
        "num_kv_splits"
    ),
    returns="nothing",
)

VLLM_CUTLASS_MLA = VendorStub(
    distribution="vllm",
    version="0.25.1",
    modules={
        "vllm._custom_ops": {
            _NAME: _Decode(signature=_SIGNATURE),
            "sm100_cutlass_mla_get_workspace_size": OpaqueFunction(
                signature=VendorSignature(
                    name="sm100_cutlass_mla_get_workspace_size",
                    parameters="max_seq_len, num_batches, sm_count, num_kv_splits",
                    returns="bytes",
                ),
                answer=lambda arguments: 1024 * arguments["num_batches"],
            ),
        }
    },
)
"""The operators of vLLM's wheel, where its own module of operators is loaded."""
