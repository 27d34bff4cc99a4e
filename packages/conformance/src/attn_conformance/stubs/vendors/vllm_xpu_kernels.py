"""Intel's kernels: vllm-xpu-kernels 0.1.16.2, read from its wheel. Nothing of it was run.

The function is Python around one operator. It sends equal short queries to the kernel for single
queries, and computes with a slow reference where the operator says that a kernel is not compiled.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.checks import Limits, refuse_unless
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = ["VLLM_XPU_KERNELS", "VLLM_XPU_KERNELS_UNCOMPILED", "VLLM_XPU_KERNELS_WITHOUT_DRIVER"]

Arguments = Mapping[str, Any]

_NAME = "flash_attn_varlen_func"
_MODULE = "vllm_xpu_kernels.flash_attn_interface"
_LONGEST_DRAFT = 16
_NOT_COMPILED = "Paged decode kernel not compiled for this config"


def _one_kind_of_lengths(arguments: Arguments) -> None:
    starts, lens, table = (
        arguments[name] is not None for name in ("cu_seqlens_k", "seqused_k", "block_table")
    )
    for holds, words in (
        (starts != lens, "exactly one of cu_seqlens_k and seqused_k is needed"),
        (lens or not table, "when enable block_table, seqused_k is needed"),
        (table or starts, "when block_table is disabled, cu_seqlens_k is needed"),
    ):
        if not holds:
            raise AssertionError(words)


def _not_implemented(arguments: Arguments) -> None:
    if arguments["fa_version"] != 2:
        raise NotImplementedError("not support yet")
    if arguments["num_splits"] > 1:
        raise NotImplementedError("FA2 does not support num_splits > 1")
    if arguments["scheduler_metadata"] is not None:
        raise NotImplementedError("FA2 does not support scheduler_metadata")
    if (arguments["k_descale"] is None) != (arguments["v_descale"] is None):
        raise NotImplementedError("FA2 only supports both KV cache descaled")


def _scalar_descales(arguments: Arguments) -> None:
    """Each has to be a view of one number: `scale.expand(B, Hkv)`."""
    for name in ("q_descale", "k_descale", "v_descale"):
        scale = arguments[name]
        if isinstance(scale, Tensor):
            is_one = scale.untyped_storage().nbytes() == scale.dtype.itemsize
            if not is_one:
                raise AssertionError(f"{name} must be view of single scalar tensor")
    is_fp8 = arguments["k"].dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    is_given = arguments["k_descale"] is not None
    refuse_unless(is_given or not is_fp8, _NAME, "FP8 KV cache requires both k_scale and v_scale")


def _lse_of_plain_calls(arguments: Arguments) -> None:
    """Xe2 has kernels with an LSE, and none of them with a window or sinks."""
    is_local = any(side != -1 for side in arguments["window_size"] or (-1, -1))
    has_extras = is_local or arguments["s_aux"] is not None
    words = "softmax_lse output is only supported when is_local=false and is_sink=false"
    refuse_unless(not (arguments["return_softmax_lse"] and has_extras), _NAME, words)


def _window_of_two(arguments: Arguments) -> None:
    window = arguments["window_size"]
    if not (window is None or len(window) == 2):
        raise AssertionError(f"window_size is {window}")


def _nothing_dropped(arguments: Arguments) -> None:
    """The function takes both, and its kernels, which have no such parameters, leave them out."""
    refuse_unless(arguments["softcap"] == 0.0, _NAME, "the kernel drops softcap")
    refuse_unless(arguments["alibi_slopes"] is None, _NAME, "the kernel drops alibi_slopes")


def _tensors_as_read(arguments: Arguments) -> None:
    """The kernels read sinks as the query's dtype, whatever they are, and dense rows."""
    query, sinks = arguments["q"], arguments["s_aux"]
    words = f"sinks of {sinks.dtype if sinks is not None else None} are read as {query.dtype}"
    refuse_unless(sinks is None or sinks.dtype is query.dtype, _NAME, words)
    for name in ("q", "out"):
        tensor = arguments[name]
        is_dense = tensor is None or tensor.is_contiguous()
        refuse_unless(is_dense, _NAME, f"{name} must be contiguous")


_FUNCTION = VarlenFunction(
    signature=VendorSignature(
        name=_NAME,
        parameters=(
            "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, "
            "seqused_k=None, q_v=None, dropout_p=0.0, softmax_scale=None, "
            "causal=False, window_size=None, softcap=0.0, alibi_slopes=None, "
            "deterministic=False, return_attn_probs=False, block_table=None, "
            "return_softmax_lse=False, out=None, scheduler_metadata=None, "
            "q_descale=None, k_descale=None, v_descale=None, num_splits=0, "
            "fa_version=2, s_aux=None, num_splits_kv=None, is_mix_batch=True, "
            "host_kv_lens=None"
        ),
        returns="out; with return_softmax_lse out and LSE (Hq, T)",
    ),
    roles=Roles(
        out="out",
        key_starts="cu_seqlens_k",
        key_lens="seqused_k",
        table="block_table",
        max_key_len="max_seqlen_k",
        alibi="alibi_slopes",
        sinks="s_aux",
        query_descale="q_descale",
        key_descale="k_descale",
        value_descale="v_descale",
        lse_flag="return_softmax_lse",
    ),
    limits=Limits(
        cache_dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
        head_size_max=512,
        page_multiple=16,
    ),
    tuning=frozenset(
        {"deterministic", "num_splits", "num_splits_kv", "is_mix_batch"}
        | {"scheduler_metadata", "fa_version"}
    ),
    rules=(
        _one_kind_of_lengths,
        _not_implemented,
        _scalar_descales,
        _window_of_two,
        _lse_of_plain_calls,
        _nothing_dropped,
        _tensors_as_read,
    ),
    needs_positive_scale=True,
)


def _is_draft(arguments: Arguments) -> bool:
    """Whether the call goes to the kernel for single queries, a request for each row."""
    longest, count = arguments["max_seqlen_q"], len(arguments["cu_seqlens_q"]) - 1
    return bool(
        arguments["block_table"] is not None
        and arguments["causal"]
        and not arguments["return_softmax_lse"]
        and 1 < longest <= _LONGEST_DRAFT
        and len(arguments["q"]) == count * longest
    )


def _as_single_queries(arguments: Arguments) -> dict[str, Any]:
    """Return the call over one request for each row; a row before all keys gets one."""
    lens, length = arguments["seqused_k"], arguments["max_seqlen_q"]
    before = torch.arange(length - 1, -1, -1, dtype=torch.int32)
    rows = len(arguments["q"])
    return {
        **arguments,
        "cu_seqlens_q": torch.arange(rows + 1, dtype=torch.int32),
        "seqused_k": (lens[:, None] - before[None]).clamp_(min=1).reshape(rows).int(),
        "block_table": arguments["block_table"].repeat_interleave(length, dim=0),
        "max_seqlen_q": 1,
        "causal": False,
    }


@dataclass(frozen=True, kw_only=True)
class _Function:
    """The function of the wheel.

    Attributes:
        is_compiled: whether the operator has a kernel for a call.
    """

    is_compiled: Callable[[Arguments], bool] = lambda arguments: True

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for it; its calls go to the recorder."""
        said: set[str] = set()

        def call(*arguments: Any, **keywords: Any) -> Any:
            bound = recorder.record(_FUNCTION.signature, arguments, keywords)
            if _is_draft(bound):
                self._require_kernel(bound)
                return _FUNCTION.answer(_as_single_queries(bound))
            try:
                self._require_kernel(bound)
            except RuntimeError as error:
                _say_once(said, str(error))
                return _by_reference(bound)
            return _without_rows_of_nobody(bound, _FUNCTION.answer(bound))

        call.__name__ = call.__qualname__ = _NAME
        call.__signature__ = _FUNCTION.signature.signature  # type: ignore[attr-defined]
        return call

    def _require_kernel(self, arguments: Arguments) -> None:
        refuse_unless(self.is_compiled(arguments), "varlen_fwd", _NOT_COMPILED)


def _without_rows_of_nobody(arguments: Arguments, result: Any) -> Any:
    """Return a result in which rows of requests without keys are what was there: NaN."""
    lens = arguments["seqused_k"]
    starts = arguments["cu_seqlens_k"]
    counts = (starts.diff() if lens is None else lens).tolist()
    output = result[0] if isinstance(result, tuple) else result
    bounds = arguments["cu_seqlens_q"].tolist()
    for index, count in enumerate(counts):
        if count < 1:
            output[bounds[index] : bounds[index + 1]] = torch.nan
    return result


def _say_once(said: set[str], error: str) -> None:
    if error in said:
        return
    said.add(error)
    words = f"XPU kernel not compiled for this config, falling back to PyTorch reference: {error}"
    logging.getLogger(_MODULE).warning(words)
    sys.stderr.write(f"[vllm_xpu_kernels] {words}\n")


def _by_reference(arguments: Arguments) -> Any:
    """Compute as the function does without a kernel: by what the module has at that moment."""
    out, with_lse = arguments["out"], arguments["return_softmax_lse"]
    window = arguments["window_size"]
    found, lse = sys.modules[_MODULE]._fallback_varlen_attn(
        *(arguments[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
        *(arguments[name] for name in ("seqused_k", "block_table", "softmax_scale", "causal")),
        (-1, -1) if window is None else tuple(window),
        arguments["softcap"],
        q_descale=arguments["q_descale"],
        k_descale=arguments["k_descale"],
        v_descale=arguments["v_descale"],
        s_aux=arguments["s_aux"],
        return_softmax_lse=with_lse,
    )
    if out is not None:
        found = out.copy_(found.reshape(out.shape))
    return (found, lse) if with_lse else found


def _fallback_varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    s_aux: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The library's slow reference; a window without a side above 0 is left out."""
    lens = seqused_k if cu_seqlens_k is None else cu_seqlens_k.diff()
    bound = _FUNCTION.signature.bind(
        (),
        {
            "q": q,
            "k": k,
            "v": v,
            "max_seqlen_q": int(cu_seqlens_q.diff().max()),
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_k": max(1, int(lens.max())) if lens is not None else 1,
            "cu_seqlens_k": cu_seqlens_k,
            "seqused_k": seqused_k,
            "softmax_scale": scale,
            "causal": causal,
            "window_size": list(window_size) if max(window_size) > 0 else None,
            "softcap": softcap,
            "block_table": block_table,
            "return_softmax_lse": return_softmax_lse,
            "out": torch.empty_like(q),
            "q_descale": q_descale,
            "k_descale": k_descale,
            "v_descale": v_descale,
            "s_aux": s_aux,
        },
    )
    bound.apply_defaults()
    result = _FUNCTION.answer(bound.arguments)
    return result if return_softmax_lse else (result, None)


def _stub(function: _Function, unavailable: str | None = None) -> VendorStub:
    interface: dict[str, object] = {
        _NAME: function,
        "_fallback_varlen_attn": _fallback_varlen_attn,
        "FA2_AVAILABLE": unavailable is None,
        "FA2_UNAVAILABLE_REASON": unavailable,
    }
    return VendorStub(
        distribution="vllm-xpu-kernels",
        version="0.1.16.2",
        modules={"vllm_xpu_kernels": {_NAME: function}, _MODULE: interface},
    )


VLLM_XPU_KERNELS = _stub(_Function())
"""vllm-xpu-kernels 0.1.16.2: the bound of queries stands before their starts."""

VLLM_XPU_KERNELS_UNCOMPILED = _stub(_Function(is_compiled=lambda arguments: False))
"""The same where no kernel is compiled for any call, so that all of it is the slow reference."""

VLLM_XPU_KERNELS_WITHOUT_DRIVER = _stub(
    _Function(), "libze_loader.so.1: cannot open shared object file: No such file or directory"
)
"""The same where Intel's driver libraries are missing: it imports, and its kernels do not."""
