"""The calls of each FlashAttention, by keyword: our arguments in, (output, LSE (Hq, T)) out.

No two libraries take the same: FlashAttention 2 wants starts of keys beside a block table where the
others want lengths, FlashAttention 3 has a call of its own for pages, FlashAttention 4 writes an
unbounded window as None, and only vLLM's builds take an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attn_cuda._fa_operators import call_of_3, call_of_vllm_3
from attn_cuda._fa_providers import Provider
from attn_cuda._fa_step import Call, Extras, KeyStep, sides
from attn_cuda._vendor import fa3_fwd, flash_attn, flash_attn_3, flash_attn_4, vllm_flash_attn
from attn_shared.spec import LayerSpec

__all__ = ["Kernel", "kernel_for", "load", "schedule"]


Kernel = Callable[[LayerSpec], Call]
"""Binds what a layer never changes."""

_DESCALES = ("q_descale", "k_descale", "v_descale")


def kernel_for(provider: Provider, spec: LayerSpec) -> Call:
    """Return the call of a layer.

    Raises:
        ImportError: the library does not load, in its own words.
    """
    return _KERNELS[provider.library](spec)


def load(library: str) -> None:
    """Import a library by its name in the inventory.

    Raises:
        ImportError: it does not load, in its own words.
    """
    _INTERFACES[library]()


def _optional(extras: Extras, **names: Any) -> dict[str, Any]:
    """Return arguments that are given, so that a release without them is called without them."""
    names.update(zip(_DESCALES, extras.descales, strict=True))
    return {name: value for name, value in names.items() if value is not None}


def _flash_attn_2(spec: LayerSpec) -> Call:
    function = flash_attn.interface().flash_attn_varlen_func
    fixed = _fixed(spec, unbounded=-1)

    def call(
        query: Tensor, key: Tensor, value: Tensor, step: KeyStep, extras: Extras
    ) -> tuple[Tensor, Tensor | None]:
        result = function(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=step.query_start_loc,
            cu_seqlens_k=step.key_start_loc,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=step.max_key_len,
            causal=step.causal,
            block_table=step.block_table,
            return_attn_probs=extras.with_lse,
            **_optional(extras, alibi_slopes=extras.slopes),
            **_by_distance(spec, step, extras, fixed),
        )
        return _first_two(result, extras.with_lse)

    return call


def _by_distance(
    spec: LayerSpec, step: KeyStep, extras: Extras, fixed: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's constants, so that FlashAttention 2 adds ALiBi as -slope * (i - j).

    In causal rows without a window it adds slope * j (csrc/flash_attn/src/alibi.h). Softmax is
    blind to the difference and the LSE is not; taken off afterwards it has cost the LSE its last
    digits. A window over all keys hides none, and takes the kernel whose bias is by distance.
    """
    is_shifted = step.causal and spec.window[0] is None and extras.slopes is not None
    if not (is_shifted and extras.with_lse):
        return fixed
    return fixed | {"window_size": (step.max_key_len - 1, 0)}


def _fixed(spec: LayerSpec, *, unbounded: int | None) -> dict[str, Any]:
    fixed: dict[str, Any] = {
        "softmax_scale": spec.scale,
        "window_size": sides(spec.window, unbounded),
    }
    if spec.softcap is not None:
        fixed["softcap"] = spec.softcap
    return fixed


def _first_two(result: Any, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return output and LSE of a call that returns a tuple only where an LSE is asked for."""
    return (result[0], result[1]) if with_lse else (result, None)


def _flash_attn_3(load: Callable[[], Any]) -> Kernel:
    def bind(spec: LayerSpec) -> Call:
        module = load()
        paged, ragged = module.flash_attn_with_kvcache, module.flash_attn_varlen_func
        fixed = _fixed(spec, unbounded=-1)

        def call(
            query: Tensor, key: Tensor, value: Tensor, step: KeyStep, extras: Extras
        ) -> tuple[Tensor, Tensor | None]:
            if step.block_table is None:
                result = ragged(
                    q=query,
                    k=key,
                    v=value,
                    cu_seqlens_q=step.query_start_loc,
                    cu_seqlens_k=step.key_start_loc,
                    max_seqlen_q=step.max_query_len,
                    max_seqlen_k=step.max_key_len,
                    causal=step.causal,
                    return_attn_probs=extras.with_lse,
                    **_optional(extras, sinks=extras.sinks),
                    **fixed,
                )
            else:
                result = paged(
                    q=query,
                    k_cache=key,
                    v_cache=value,
                    cache_seqlens=step.key_lens,
                    page_table=step.block_table,
                    cu_seqlens_q=step.query_start_loc,
                    max_seqlen_q=step.max_query_len,
                    causal=step.causal,
                    num_splits=step.num_splits,
                    return_softmax_lse=extras.with_lse,
                    **_optional(extras, sinks=extras.sinks, scheduler_metadata=step.schedule),
                    **fixed,
                )
            return _first_two(result, extras.with_lse)

        return call

    return bind


def _flash_attn_3_at_best(spec: LayerSpec) -> Call:
    """Bind the operator where it is to be seen, else the functions around it."""
    operator = flash_attn_3.operator()
    if operator is None:
        return _flash_attn_3(flash_attn_3.interface)(spec)
    return call_of_3(operator, spec)


def _vllm(version: int) -> Kernel:
    def bind(spec: LayerSpec) -> Call:
        function = vllm_flash_attn.interface().flash_attn_varlen_func
        fixed = _fixed(spec, unbounded=-1) | {"fa_version": version}

        def call(
            query: Tensor, key: Tensor, value: Tensor, step: KeyStep, extras: Extras
        ) -> tuple[Tensor, Tensor | None]:
            query_descale, key_descale, value_descale = extras.descales
            result = function(
                q=query,
                k=key,
                v=value,
                max_seqlen_q=step.max_query_len,
                cu_seqlens_q=step.query_start_loc,
                max_seqlen_k=step.max_key_len,
                cu_seqlens_k=step.key_start_loc,
                seqused_k=step.key_lens,
                causal=step.causal,
                alibi_slopes=extras.slopes,
                block_table=step.block_table,
                return_softmax_lse=extras.with_lse,
                out=extras.out,
                scheduler_metadata=step.schedule,
                q_descale=query_descale,
                k_descale=key_descale,
                v_descale=value_descale,
                num_splits=step.num_splits,
                s_aux=extras.sinks,
                **(fixed if extras.slopes is None else _by_distance(spec, step, extras, fixed)),
            )
            return _first_two(result, extras.with_lse)

        return call

    return bind


def _vllm_3_at_best(spec: LayerSpec) -> Call:
    """Bind the operator where it is the known one, else the function around it."""
    operator = vllm_flash_attn.operator_3()
    return _vllm(3)(spec) if operator is None else call_of_vllm_3(operator, spec)


def _flash_attn_4(spec: LayerSpec) -> Call:
    function = flash_attn_4.interface().flash_attn_varlen_func
    fixed = _fixed(spec, unbounded=None)

    def call(
        query: Tensor, key: Tensor, value: Tensor, step: KeyStep, extras: Extras
    ) -> tuple[Tensor, Tensor | None]:
        output, lse, *_ = function(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=step.max_key_len,
            causal=step.causal,
            return_lse=extras.with_lse,
            **_optional(
                extras,
                seqused_k=step.key_lens,
                cu_seqlens_k=step.key_start_loc,
                page_table=step.block_table,
                learnable_sink=extras.sinks,
            ),
            **fixed,
        )
        return output, lse

    return call


_INTERFACES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "flash_attn": flash_attn.interface,
        "flash_attn_3": flash_attn_3.interface,
        "fa3_fwd": fa3_fwd.interface,
        "vllm_flash_attn_2": vllm_flash_attn.interface,
        "vllm_flash_attn_3": vllm_flash_attn.interface,
        "flash_attn_4": flash_attn_4.interface,
    }
)

_KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "flash_attn": _flash_attn_2,
        "flash_attn_3": _flash_attn_3_at_best,
        "fa3_fwd": _flash_attn_3(fa3_fwd.interface),
        "vllm_flash_attn_2": _vllm(2),
        "vllm_flash_attn_3": _vllm_3_at_best,
        "flash_attn_4": _flash_attn_4,
    }
)


def schedule(
    provider: Provider, spec: LayerSpec, step: KeyStep, *, page_size: int, dtype: torch.dtype
) -> Tensor:
    """Return FlashAttention 3's schedule of a step, int32; it starts a kernel, and waits for none.

    Args:
        provider: one that has schedules.
        spec: of the layers, which share window and softcap.
        step: with lengths and a block table.
        page_size: tokens per page.
        dtype: of query and keys as the kernel gets them.
    """
    load = flash_attn_3 if provider.library == "flash_attn_3" else vllm_flash_attn
    result: Tensor = load.interface().get_scheduler_metadata(
        batch_size=step.num_reqs,
        max_seqlen_q=step.max_query_len,
        max_seqlen_k=step.max_key_len,
        num_heads_q=spec.num_heads,
        num_heads_kv=spec.num_kv_heads,
        headdim=spec.head_size,
        headdim_v=spec.head_size_v,
        cache_seqlens=step.key_lens,
        qkv_dtype=dtype,
        cu_seqlens_q=step.query_start_loc,
        page_size=page_size,
        causal=step.causal,
        window_size=sides(spec.window, -1),
        has_softcap=spec.softcap is not None,
        num_splits=step.num_splits,
    )
    return result
