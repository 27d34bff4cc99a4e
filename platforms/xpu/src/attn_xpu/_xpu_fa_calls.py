"""The call of vllm-xpu-kernels, by keyword: our arguments in, output and LSE (Hq, T) out.

Its function has (max_seqlen_q, cu_seqlens_q, max_seqlen_k) as its third group, unlike every other
FlashAttention, and takes lengths with a block table, but starts of keys without one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_shared.errors import UnsupportedOptionError
from attn_shared.spec import LayerSpec
from attn_xpu import _xpu_fa_slow as slow
from attn_xpu._vendor import vllm_xpu_kernels
from attn_xpu._xpu_fa_capability import LIBRARY, NAME

__all__ = ["Descales", "Extras", "KernelCall", "KeyStep"]

_NOT_COMPILED = "not compiled"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyStep:
    """Queries and keys of one step, as all its layers share them.

    Attributes:
        query_start_loc: (B + 1,) int32.
        max_query_len: host bound.
        max_key_len: host bound.
        causal: bottom-right aligned.
        key_lens: (B,) int32, of keys in pages, at least 1 each.
        key_start_loc: (B + 1,) int32, of keys that come with the call.
        block_table: (B, M) int32, or None for keys that come with the call.
        has_decodes: requests of one query are left to the kernel for single queries.
    """

    query_start_loc: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
    key_lens: Tensor | None = None
    key_start_loc: Tensor | None = None
    block_table: Tensor | None = None
    has_decodes: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class Extras:
    """What a call has beside tensors and lengths.

    Attributes:
        with_lse: the LSE is wanted.
        sinks: (Hq,) of the query's dtype.
        descales: of key and value, views of one float32 number each; None without fp8.
    """

    with_lse: bool = False
    sinks: Tensor | None = None
    descales: tuple[Tensor, Tensor] | None = None


class KernelCall:
    """One layer's call, with what never changes bound, which reports a slow path."""

    def __init__(self, spec: LayerSpec) -> None:
        """Bind the function.

        Args:
            spec: of the layer, its scale positive.

        Raises:
            ImportError: the library does not load, in its own words.
        """
        interface = vllm_xpu_kernels.interface()
        self._function: Callable[..., Any] = interface.flash_attn_varlen_func
        self._window = [-1 if side is None else side for side in spec.window]
        self._scale = spec.scale
        self._words = _described(spec)
        self.slow_calls = 0

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, step: KeyStep, extras: Extras
    ) -> Tensor | None:
        """Write the output (T, Hq, D), and return the LSE (Hq, T) if it is wanted.

        Raises:
            UnsupportedOptionError: the library has neither a kernel for the call nor a stand-in.
        """
        before = slow.count()
        try:
            result = self._attend(query, key, value, out, step, extras)
        except RuntimeError as error:
            if _NOT_COMPILED not in str(error):
                raise
            result = self._attend_without_shortcut(query, key, value, out, step, extras)
        if slow.count() != before:
            self._report()
        output, lse = result if isinstance(result, tuple) else (result, None)
        if output.data_ptr() != out.data_ptr():
            out.copy_(output)
        return _heads_first(lse, query) if extras.with_lse else None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, step: KeyStep, extras: Extras
    ) -> Any:
        key_descale, value_descale = extras.descales or (None, None)
        return self._function(
            q=query,
            k=key,
            v=value,
            max_seqlen_q=step.max_query_len,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_k=step.max_key_len,
            cu_seqlens_k=step.key_start_loc,
            seqused_k=step.key_lens,
            softmax_scale=self._scale,
            causal=step.causal,
            window_size=self._window,
            block_table=step.block_table,
            return_softmax_lse=extras.with_lse,
            out=out,
            k_descale=key_descale,
            v_descale=value_descale,
            s_aux=extras.sinks,
            is_mix_batch=step.has_decodes and not extras.with_lse,
        )

    def _attend_without_shortcut(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        step: KeyStep,
        extras: Extras,
    ) -> Any:
        """Call again where the library's shortcut for drafts let "not compiled" through.

        Equal queries of 2 to 16 tokens go to the kernel for single queries, outside of what falls
        back. By its bound of queries the library knows them: with a looser one they stay off that
        way.
        """
        looser = replace(step, max_query_len=step.max_query_len + 1)
        try:
            return self._attend(query, key, value, out, looser, extras)
        except RuntimeError as error:
            if _NOT_COMPILED not in str(error):
                raise
            raise UnsupportedOptionError(
                f"{NAME} does not serve {self._words}: {LIBRARY} has no kernel for it ({error}).",
                hint="TRITON_ATTN and TORCH_SDPA serve it; a build of vllm-xpu-kernels with "
                "that kernel configured has it.",
            ) from error

    def _report(self) -> None:
        self.slow_calls += 1
        warnings.warn(
            f"{NAME}: {LIBRARY} has no kernel compiled for {self._words}, and falls back to its "
            "slow reference; TRITON_ATTN serves it by a kernel",
            slow.SlowReferenceWarning,
            stacklevel=3,
        )


def _described(spec: LayerSpec) -> str:
    """Say what chooses the kernel of a layer."""
    cache = spec.kv_cache_spec
    words = [f"heads of {spec.head_size}", "no pages" if cache is None else ""]
    if cache is not None:
        words[1] = f"pages of {cache.block_size}"
    if spec.window != (None, None):
        words.append(f"a window of {spec.window}")
    if spec.has_sinks:
        words.append("sinks")
    return ", ".join(words)


def _heads_first(lse: Tensor | None, query: Tensor) -> Tensor:
    """Return an LSE as (Hq, T).

    Raises:
        UnsupportedOptionError: the library returned none, or one of another shape.
    """
    shape = (query.shape[1], query.shape[0])
    if lse is not None and tuple(lse.shape) == shape:
        return lse
    found = None if lse is None else tuple(lse.shape)
    raise UnsupportedOptionError(
        f"the LSE that {LIBRARY} returned is {found}; allowed: {shape}, (query heads, tokens)."
    )


class Descales:
    """Factors of an fp8 cache as the kernels read them: views (B, Hkv) of one float32 number."""

    def __init__(self, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._numbers: dict[tuple[float, torch.device], Tensor] = {}

    def of(self, name: str, scale: float | Tensor, num_reqs: int, device: torch.device) -> Tensor:
        """Return one scale; a tensor is copied only where it is part of a larger one.

        Raises:
            UnsupportedOptionError: a scale for each of several heads.
        """
        if not isinstance(scale, Tensor):
            key = (float(scale), device)
            if key not in self._numbers:
                self._numbers[key] = torch.full((), key[0], device=device)
            number = self._numbers[key]
        elif scale.numel() != 1:
            raise UnsupportedOptionError(
                f"layer.{name} of {scale.numel()} heads is not served by {NAME}; allowed: one "
                "number, which its kernels take.",
                hint="say per_head_quant_scales in the request, and selection finds who does.",
            )
        else:
            number = scale.reshape(()).float()
            if number.untyped_storage().nbytes() != number.element_size():
                number = number.clone()
        return number.expand(num_reqs, self._num_kv_heads)
