"""intel-extension-for-pytorch 2.8: both builds, read from the CPU wheel 2.8.0 and its repository.

The CPU build was run, and answers here as it did there: its call for prefill takes the tokens of a
head for neighbours and a left side of 0 for no window, its call for single queries counts the
query's own key in a window and works in parts of 128 keys, its call without a cache leaves the
scale out. The build for GPUs (2.8.10+xpu) has not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.attend import KernelCall
from attn_conformance.stubs.checks import check_indices, refuse_unless
from attn_conformance.stubs.modules import Namespace, VendorStub
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature

__all__ = ["IPEX_CPU", "IPEX_XPU"]

Arguments = Mapping[str, Any]

_PARTITION = 128

_WRITE = VendorSignature(
    name="reshape_and_cache",
    parameters="key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype='auto', "
    "k_scale=1.0, v_scale=1.0",
    returns="nothing that is read",
)
_SINGLE = VendorSignature(
    name="single_query_cached_kv_attention",
    parameters="output, query, key_cache, value_cache, head_mapping, scale, block_tables, "
    "context_lens, block_size, max_context_len, alibi_slopes, window_size=-1, k_scale=1.0, "
    "v_scale=1.0, softcap=-1.0",
    returns="nothing that is read",
)
_PREFILL = VendorSignature(
    name="flash_attn_varlen_func",
    parameters="output, query, key_cache, value_cache, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, "
    "max_seqlen_kv, scale, is_cusal, block_tables, alibi_slopes, window_size_left=-1, "
    "window_size_right=-1, kv_cache_dtype='auto', k_scale=1.0, v_scale=1.0, softcap=-1.0",
    returns="nothing that is read",
)
_VARLEN = VendorSignature(
    name="apply_function",
    parameters="query, key, value, out, seqlen_q, seqlen_k, alibi_slopes, max_seqlen_q, "
    "max_seqlen_k, pdropout, softmax_scale, zero_tensors, is_causal, return_softmax, gen_, "
    "window_size_left, window_size_right, softcap",
    returns="out",
)


@dataclass(frozen=True, kw_only=True)
class _Method:
    """One class method.

    Attributes:
        signature: its parameters.
        answer: computes, from the arguments.
    """

    signature: VendorSignature
    answer: Callable[[Arguments], Any]

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for it; its calls go to the recorder."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.answer(recorder.record(self.signature, arguments, keywords))

        call.__name__ = call.__qualname__ = self.signature.name
        call.__signature__ = self.signature.signature  # type: ignore[attr-defined]
        return call


def _tokens_first(cache: Tensor, is_cpu: bool) -> Tensor:
    """Return a cache as (blocks, block, kv heads, width)."""
    return cache.transpose(1, 2) if is_cpu else cache


def _finish(arguments: Arguments, call: KernelCall, name: str = "output") -> None:
    """Write an answer; rows without keys are divided by zero."""
    result = call.attend()
    out: Tensor = arguments[name]
    refuse_unless(out.dtype is call.query.dtype, name, f"{name} is {out.dtype}")
    answer = result.output.to(out.dtype)
    keyless = (result.lse == -torch.inf).T
    answer = answer.masked_fill(keyless[..., None], torch.nan)
    bounds = call.query_starts.tolist()
    out[: bounds[-1]] = answer[: bounds[-1]]


def _softcap(arguments: Arguments) -> float | None:
    return arguments["softcap"] if arguments["softcap"] > 0 else None


def _no_scales(arguments: Arguments, name: str) -> None:
    """The call takes scales and drops them, so that none but 1 may be given."""
    is_plain = arguments["k_scale"] == arguments["v_scale"] == 1.0
    refuse_unless(is_plain, name, "k_scale and v_scale are dropped")


def _single(arguments: Arguments) -> None:
    query, block = arguments["query"], arguments["block_size"]
    check_indices("single", "block_tables", arguments["block_tables"], (len(query), None))
    check_indices("single", "context_lens", arguments["context_lens"], (len(query),))
    refuse_unless(arguments["block_tables"].is_contiguous(), "single", "block_tables is a view")
    refuse_unless(arguments["alibi_slopes"] is None, "single", "slopes are not computed")
    refuse_unless(_PARTITION % block == 0, "single", "free(): invalid next size")
    refuse_unless(arguments["scale"] > 0, "single", "the sign of the scale is not computed")
    _no_scales(arguments, "single")
    window = arguments["window_size"]
    is_both = window > 0 and _softcap(arguments) is not None
    refuse_unless(not is_both, "single", "!(window_size > 0 && use_softcap == true)")
    call = KernelCall(
        query=query,
        key=_tokens_first(arguments["key_cache"], True),
        value=_tokens_first(arguments["value_cache"], True),
        query_starts=torch.arange(len(query) + 1, dtype=torch.int32),
        key_lens=arguments["context_lens"],
        block_table=arguments["block_tables"],
        scale=arguments["scale"],
        is_causal=True,
        window=(None if window <= 0 else window - 1, None),
        softcap=_softcap(arguments),
    )
    _finish(arguments, call)


def _prefill(is_cpu: bool) -> Callable[[Arguments], None]:
    def answer(arguments: Arguments) -> None:
        starts, key_starts = arguments["cu_seqlens_q"], arguments["cu_seqlens_kv"]
        count = len(starts) - 1
        check_indices("prefill", "cu_seqlens_q", starts, (None,))
        check_indices("prefill", "cu_seqlens_kv", key_starts, (count + 1,))
        check_indices("prefill", "block_tables", arguments["block_tables"], (count, None))
        words = "alibi_slopes is not supported for flash_attn_varlen yet"
        refuse_unless(arguments["alibi_slopes"] is None, "prefill", words)
        _no_scales(arguments, "prefill")
        cache: Tensor = arguments["key_cache"]
        is_read = not is_cpu or cache.stride(2) == cache.shape[3] or cache.shape[2] == 1
        refuse_unless(is_read, "prefill", "tokens of a head are read as neighbours")
        left, right = arguments["window_size_left"], arguments["window_size_right"]
        refuse_unless(left != 0, "prefill", "a left side of 0 is taken for none")
        call = KernelCall(
            query=arguments["query"],
            key=_tokens_first(cache, is_cpu),
            value=_tokens_first(arguments["value_cache"], is_cpu),
            query_starts=starts,
            key_lens=key_starts.diff(),
            block_table=arguments["block_tables"],
            scale=arguments["scale"],
            is_causal=arguments["is_cusal"],
            window=(None if left < 0 else left, None if right < 0 else right),
            softcap=_softcap(arguments),
        )
        refuse_unless(arguments["scale"] > 0, "prefill", "a scale that is not positive gives NaN")
        _finish(arguments, call)

    return answer


def _varlen(is_cpu: bool) -> Callable[[Arguments], Tensor]:
    def answer(arguments: Arguments) -> Tensor:
        sides = (arguments["window_size_left"], arguments["window_size_right"])
        if sides != (-1, -1) or arguments["softcap"] != -1.0 or arguments["alibi_slopes"]:
            raise AssertionError("ipex do not support window, softcap or alibi_slopes")
        query, scale = arguments["query"], arguments["softmax_scale"]
        call = KernelCall(
            query=query,
            key=arguments["key"],
            value=arguments["value"],
            query_starts=arguments["seqlen_q"],
            key_lens=arguments["seqlen_k"].diff(),
            key_starts=arguments["seqlen_k"],
            scale=query.shape[-1] ** -0.5 if is_cpu else scale,
            is_causal=arguments["is_causal"],
        )
        refuse_unless(is_cpu or scale > 0, "varlen", "a scale that is not positive gives NaN")
        _finish(arguments, call, "out")
        out: Tensor = arguments["out"]
        return out

    return answer


def _write(arguments: Arguments) -> None:
    slots, cache = arguments["slot_mapping"], arguments["key_cache"]
    refuse_unless(bool((slots >= 0).all()), "write", "a slot of -1 is written before the cache")
    for rows, target in (
        (arguments["key"], cache),
        (arguments["value"], arguments["value_cache"]),
    ):
        refuse_unless(rows.dtype is target.dtype, "write", f"{rows.dtype} into {target.dtype}")
        block = target.shape[2]
        target[slots.long() // block, :, slots.long() % block] = rows


def _stub(version: str, label: str) -> VendorStub:
    is_cpu = label == "cpu"
    paged = {
        "flash_attn_varlen_func": _Method(signature=_PREFILL, answer=_prefill(is_cpu)),
        "single_query_cached_kv_attention": _Method(signature=_SINGLE, answer=_single),
        "reshape_and_cache": _Method(signature=_WRITE, answer=_write),
    }
    varlen = {"apply_function": _Method(signature=_VARLEN, answer=_varlen(is_cpu))}
    return VendorStub(
        distribution="intel-extension-for-pytorch",
        version=version if is_cpu else f"{version}+{label}",
        modules={
            "intel_extension_for_pytorch": {"__version__": f"{version}+{label}"},
            "intel_extension_for_pytorch.llm.modules": {
                "PagedAttention": Namespace(functions=paged),
                "VarlenAttention": Namespace(functions=varlen),
            },
        },
    )


IPEX_CPU = _stub("2.8.0", "cpu")
"""The CPU build, whose metadata on the package index leaves its label out."""

IPEX_XPU = _stub("2.8.10", "xpu")
"""The build for GPUs."""
