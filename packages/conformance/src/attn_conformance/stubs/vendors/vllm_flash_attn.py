"""FlashAttention 2 and 3 inside vLLM 0.25.1, read from its wheel: one function, two extensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.attend import LseForm
from attn_conformance.stubs.checks import Limits, refuse_unless
from attn_conformance.stubs.modules import Namespace, VendorStub
from attn_conformance.stubs.opaque import OpaqueFunction
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = [
    "SCHEDULER_METADATA",
    "VLLM_FLASH_ATTN",
    "VLLM_FLASH_ATTN_2",
    "VLLM_FLASH_ATTN_3",
    "VLLM_FLASH_ATTN_3_FUNCTION",
]

Arguments = Mapping[str, Any]

_NAME = "flash_attn_varlen_func"
_MAX_SINK_HEADS = 64
_NEUTRAL_3: Mapping[str, Any] = {
    "is_rotary_interleaved": True,
    "pack_gqa": None,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
_LIMITS_3 = Limits(dtypes=(torch.float16, torch.bfloat16, torch.float8_e4m3fn), head_size_max=576)

_SIGNATURE = VendorSignature(
    name=_NAME,
    parameters=(
        "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, "
        "q_v=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, "
        "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, "
        "block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None, "
        "q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, "
        "fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, "
        "mask_mod=None, aux_tensors=None, dynamic_causal=None"
    ),
    returns="out; with return_softmax_lse out and LSE (Hq, T)",
)
_ROLES = Roles(
    query_value="q_v",
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
)
_TUNING = frozenset({"deterministic", "num_splits", "scheduler_metadata", "fa_version"})


def _one_kind_of_lengths(arguments: Arguments) -> None:
    lens, starts = arguments["seqused_k"], arguments["cu_seqlens_k"]
    if (lens is None) == (starts is None):
        raise AssertionError("exactly one of cu_seqlens_k and seqused_k must be provided")
    if arguments["block_table"] is not None and lens is None:
        raise AssertionError("seqused_k must be provided if block_table is provided")


def _one_kind_of_lengths_3(arguments: Arguments) -> None:
    """The kernel takes starts before lengths, and says nothing of both."""
    _one_kind_of_lengths({**arguments, "block_table": arguments["page_table"]})


def _neutral_of_3(arguments: Arguments) -> None:
    """Of what is not computed here a call by position says the neutral value."""
    for name, neutral in _NEUTRAL_3.items():
        refuse_unless(arguments[name] is neutral, "fwd", f"{name}={arguments[name]}")


def _limits_of_2(arguments: Arguments) -> None:
    if arguments["q_v"] is not None:  # the wrapper drops it without a word
        raise NotImplementedError("FA2 does not support q_v")
    if arguments["s_aux"] is not None:
        raise NotImplementedError("FA2 does not support s_aux")
    if arguments["num_splits"] > 1:
        raise NotImplementedError("FA2 does not support num_splits > 1")
    # The wrapper drops these without a word where not all are given; here none may be.
    for name in ("scheduler_metadata", "q_descale", "k_descale", "v_descale"):
        if arguments[name] is not None:
            raise NotImplementedError(f"FA2 does not support {name}")


def _rows_of_2(arguments: Arguments) -> None:
    """With single queries row i is taken for request i (query heads of a group become rows)."""
    query, key = arguments["q"], arguments["k"]
    is_swapped = (
        arguments["max_seqlen_q"] == 1
        and query.shape[1] > key.shape[-2]
        and all(side < 0 for side in arguments["window_size"] or (-1, -1))
        and arguments["alibi_slopes"] is None
    )
    count = len(arguments["cu_seqlens_q"]) - 1
    words = f"shape '[{count}, ...]' is invalid for {len(query)} rows"
    refuse_unless(not is_swapped or len(query) == count, _NAME, words)


def _limits_of_3(arguments: Arguments) -> None:
    if arguments["alibi_slopes"] is not None:
        raise AssertionError("Alibi is not supported in FA3")
    _kernel_limits_of_3(arguments, table="block_table")


def _kernel_limits_of_3(arguments: Arguments, table: str = "page_table") -> None:
    sinks, heads = arguments["s_aux"], arguments["q"].shape[1]
    size, value_size = arguments["q"].shape[-1], arguments["v"].shape[-1]
    words = f"head dimensions {size}, {value_size} are not supported: at most 256, 512"
    refuse_unless(size <= 256 and value_size <= 512, _NAME, words)
    _query_value_of_3(arguments["q"], arguments["q_v"], value_size)
    if sinks is not None:
        is_taken = sinks.dtype is torch.bfloat16
        refuse_unless(is_taken, _NAME, "We only support bf16 dtype for S aux.")
        words = "We only support query heads <= 64 with S aux"
        refuse_unless(heads <= _MAX_SINK_HEADS, _NAME, words)
        words = "We don't support S aux with hdim != hdim_v"
        refuse_unless(size == value_size, _NAME, words)
    is_served = (
        size == value_size
        or (size <= 64 and value_size <= 512)
        or (128 < size <= 192 and 96 < value_size <= 128)
    )
    words = f"V headdim {value_size} is not supported with Q/K headdim {size}"
    refuse_unless(is_served, _NAME, words)
    # The kernel for both widths up to 64 reads pages of V as wide as K, and says nothing.
    is_cut = arguments[table] is not None and size < value_size <= 64
    refuse_unless(not is_cut, _NAME, f"columns of V past the {size}th are not read from pages")


def _query_value_of_3(query: Tensor, query_value: Tensor | None, value_size: int) -> None:
    if query_value is None:
        return
    width = query.shape[-1]
    words = f"q_v is only supported for hdim <= 64 and hdim_v >= 256, not {width}, {value_size}"
    refuse_unless(width <= 64 and value_size >= 256, _NAME, words)
    expected = (*query.shape[:-1], value_size)
    words = f"q_v must have shape {expected}, not {tuple(query_value.shape)}"
    refuse_unless(tuple(query_value.shape) == expected, _NAME, words)
    words = f"q_v is only supported for fp16 and bf16, not {query_value.dtype}"
    is_half = query_value.dtype in (torch.float16, torch.bfloat16)
    refuse_unless(is_half and query_value.dtype is query.dtype, _NAME, words)


_OPERATOR_3 = VarlenFunction(
    signature=VendorSignature(
        name="fwd",
        parameters=(
            "q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, "
            "seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, "
            "leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, "
            "softmax_scale, is_causal, window_size_left, window_size_right, softcap, "
            "is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, "
            "cp_world_size, cp_rank, cp_tot_seqused_k"
        ),
        returns="out, LSE and two accumulators",
    ),
    roles=Roles(
        query_value="q_v",
        out="out",
        key_starts="cu_seqlens_k",
        key_lens="seqused_k",
        table="page_table",
        max_key_len="max_seqlen_k",
        causal="is_causal",
        window="",
        window_sides=("window_size_left", "window_size_right"),
        sinks="s_aux",
        query_descale="q_descale",
        key_descale="k_descale",
        value_descale="v_descale",
    ),
    limits=_LIMITS_3,
    tuning=frozenset({"num_splits", "scheduler_metadata", *_NEUTRAL_3}),
    plain=("output", "lse", "none", "none"),
    rules=(_one_kind_of_lengths_3, _kernel_limits_of_3, _neutral_of_3),
    needs_positive_scale=True,
)

_BY_VERSION = {
    2: VarlenFunction(
        signature=_SIGNATURE,
        roles=_ROLES,
        limits=Limits(page_multiple=16),
        lse=LseForm(keyless=float("inf"), alibi_by_column=True, keyless_astray=True),
        tuning=_TUNING,
        rules=(_one_kind_of_lengths, _limits_of_2, _rows_of_2),
        needs_positive_scale=True,
    ),
    3: VarlenFunction(
        signature=_SIGNATURE,
        roles=_ROLES,
        limits=_LIMITS_3,
        tuning=_TUNING,
        rules=(_one_kind_of_lengths, _limits_of_3),
        needs_positive_scale=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Versions:
    """The function, which hands a call on to the extension of a version."""

    versions: tuple[int, ...]

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for it; its calls go to the recorder."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            bound = recorder.record(_SIGNATURE, arguments, keywords)
            version = bound["fa_version"]
            if version not in self.versions:
                raise ValueError(f"Unsupported FA version: {version}")
            return _BY_VERSION[version].answer(bound)

        call.__name__ = call.__qualname__ = _NAME
        call.__signature__ = _SIGNATURE.signature  # type: ignore[attr-defined]
        return call


SCHEDULER_METADATA = OpaqueFunction(
    signature=VendorSignature(
        name="get_scheduler_metadata",
        parameters=(
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
            "cache_seqlens, qkv_dtype='torch.bfloat16', headdim_v=None, cu_seqlens_q=None, "
            "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
            "causal=False, window_size=(-1, -1), has_softcap=False, num_splits=0, "
            "pack_gqa=None, sm_margin=0"
        ),
        returns="int32, read by the kernel alone",
    ),
    answer=lambda arguments: torch.zeros(
        1 + 4 * (-(-arguments["batch_size"] // 4) * 4), dtype=torch.int32
    ),
)


def _stub(*versions: int, shows_operator: bool = True) -> VendorStub:
    flags: dict[str, object] = {}
    for version in (2, 3):
        is_there = version in versions
        flags[f"FA{version}_AVAILABLE"] = is_there
        words = None if is_there else f"cannot import name '_vllm_fa{version}_C'"
        flags[f"FA{version}_UNAVAILABLE_REASON"] = words
    module: dict[str, object] = {
        _NAME: _Versions(versions=versions),
        "get_scheduler_metadata": SCHEDULER_METADATA,
        **flags,
    }
    if 3 in versions and shows_operator:
        module["_vllm_fa3_C"] = Namespace(functions={"fwd": _OPERATOR_3})
    return VendorStub(
        distribution="vllm",
        version="0.25.1",
        modules={"vllm.vllm_flash_attn.flash_attn_interface": module},
    )


VLLM_FLASH_ATTN = _stub(2, 3)
"""vLLM's wheel as it is: pages of 16 tokens, an output argument, and a version in each call."""

VLLM_FLASH_ATTN_2 = _stub(2)
"""The same where only the extension of FlashAttention 2 loads."""

VLLM_FLASH_ATTN_3 = _stub(3)
"""The same where only the extension of FlashAttention 3 loads."""

VLLM_FLASH_ATTN_3_FUNCTION = _stub(3, shows_operator=False)
"""The same where the operator behind the function is not to be seen."""
