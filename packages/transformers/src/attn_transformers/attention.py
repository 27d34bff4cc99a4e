"""The attention function that transformers' models call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.gradients import refuse_gradients
from attn_shared.request import AttentionType
from attn_shared.selection import Policy
from attn_transformers.contiguous import attend_cache_free, attend_over_scratch
from attn_transformers.latents import Latents, latents_of, mla_layer_for
from attn_transformers.layers import LayerKey, attention_for
from attn_transformers.masks import StepMask, step_of
from attn_transformers.new_tokens import NewTokens, new_tokens_of
from attn_transformers.options import Rules, refuse_unserved, rules_of
from attn_transformers.step_call import LATEST_CALL, Arguments, StepCall, call_of

__all__ = ["AttentionFunction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFunction:
    """What one `attn_implementation` name stands for.

    Attributes:
        policy: which backend, and who named it.
        is_checked: validate the contents of every batch.
    """

    policy: Policy
    is_checked: bool = False

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **extras: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; the signature is transformers' (AttentionInterface).

        Args:
            module: the attention module.
            query: (B, Hq, Tq, D).
            key: (B, Hkv, Tk, D), heads not repeated; with a `PagedCache` the new tokens alone.
            value: (B, Hkv, Tk, Dv).
            attention_mask: what attn's mask function made; None: no padding, and causal as the
                module says.
            dropout: refused unless 0.
            scaling: factor on q.k; None: 1 / sqrt(D).
            is_causal: for calls without a mask.
            sliding_window: keys of the window, the query's own included.
            softcap: cap of the logits.
            s_aux: (Hq,) sinks.
            extras: refused by name, unless they are None or known to have no effect.

        Returns:
            (B, Tq, Hq, Dv) with zeros for padding, and None for the weights.

        Raises:
            UnsupportedOptionError: an option that is not served.
            InvalidInputError: shapes that do not fit each other.
            NoBackendError: no backend serves the layer on this device.
        """
        refuse_unserved(extras, dropout)
        _refuse_tracing()
        step = None if attention_mask is None else step_of(attention_mask)
        note = new_tokens_of(key, value)
        arguments = self, is_causal, sliding_window, softcap, scaling
        if note is None or step is None or s_aux is not None:
            return self._attend(module, query, key, value, step, note, arguments, s_aux), None
        call: StepCall | None = step.memo.get(LATEST_CALL)
        if call is not None and call.covers(note, arguments, query, key, value):
            return call.run(note, query, key, value), None
        return self._attend(module, query, key, value, step, note, arguments, None), None

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: StepMask | None,
        note: NewTokens | None,
        arguments: Arguments,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Find out what the call asks for, hold it to the mask, and attend."""
        _, is_causal, sliding_window, softcap, scaling = arguments
        latents = latents_of(module) if note is None else None
        if latents is not None:
            note = latents.note
        _check_shapes(query, key, value, step, note)
        rules = rules_of(
            module,
            step,
            is_causal=is_causal,
            sliding_window=sliding_window,
            query_len=query.shape[2],
        )
        layer_key = self._key_of(query, key, value, rules, scaling, softcap, sinks, note)
        if latents is not None:
            return _attend_latents(latents, layer_key, module, query, step)
        attention = attention_for(layer_key, module, sinks)
        if note is not None:
            output = note.cache.attend(note, layer_key, attention, query, key, value, step)
            if step is not None and sinks is None:
                step.memo[LATEST_CALL] = call_of(note, attention, arguments, query, key, value)
            return output
        # The layer refuses them too, but when keys are already in the scratch cache.
        refuse_gradients(attention, query=query, key=key, value=value)
        run = attend_over_scratch if layer_key.is_causal else attend_cache_free
        return run(attention, layer_key, query, key, value, step)

    def _key_of(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: Rules,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        note: NewTokens | None,
    ) -> LayerKey:
        is_cache_free = note is None and not rules.is_causal
        return LayerKey(
            policy=self.policy,
            is_checked=self.is_checked,
            device=query.device,
            dtype=query.dtype,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            head_size_v=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            window=rules.window,
            softcap=softcap,
            has_sinks=sinks is not None,
            is_causal=rules.is_causal,
            attn_type=AttentionType.ENCODER_ONLY if is_cache_free else AttentionType.DECODER,
            block_size=None if note is None else note.cache.block_size,
            kv_cache_dtype="auto" if note is None else note.cache.kv_cache_dtype,
        )


def _attend_latents(
    latents: Latents,
    layer_key: LayerKey,
    module: torch.nn.Module,
    query: torch.Tensor,
    step: StepMask | None,
) -> torch.Tensor:
    """Attend over the latents in the cache: the expanded keys of the call are not looked at."""
    if layer_key.has_sinks or not layer_key.is_causal:
        raise UnsupportedOptionError(
            f"latent attention with has_sinks={layer_key.has_sinks} and "
            f"is_causal={layer_key.is_causal}; allowed: False and True.",
            hint="leave out the PagedCache for this model.",
        )
    dims = latents.dims
    layer_key = replace(
        layer_key,
        num_kv_heads=1,
        head_size=dims.latent_size,
        head_size_v=dims.kv_lora_rank,
        mla=dims,
    )
    attention = mla_layer_for(layer_key, module, latents.weight)
    tensors = query, latents.latent, latents.rope
    return latents.note.cache.attend(latents.note, layer_key, attention, *tensors, step)


def _refuse_tracing() -> None:
    if torch.compiler.is_compiling():
        raise UnsupportedOptionError(
            "the model is being compiled; attn's attention function plans each step on the host.",
            hint="run the model uncompiled, or compile it with another attn_implementation.",
        )


def _check_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask | None,
    note: NewTokens | None,
) -> None:
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[:3] != value.shape[:3]:
        shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        raise InvalidInputError.for_argument(
            "shapes of query, key and value", shapes, "(B, Hq, Tq, D), (B, Hkv, Tk, D) and Dv"
        )
    if step is None:
        return
    handed_len = step.handed_len if note is None else note.count
    if (query.shape[2], key.shape[2]) != (step.query_len, handed_len):
        raise InvalidInputError.for_argument(
            "(queries, keys) per row",
            (query.shape[2], key.shape[2]),
            f"({step.query_len}, {handed_len}), which the mask was made for",
            hint="a PagedCache needs a model that passes its keys on unchanged.",
        )
