"""One `attn_shared.Attention` for all layers of a model that are alike."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from attn_shared.layer import Attention
from attn_shared.mla import MLAAttention
from attn_shared.request import AttentionType, MLADims, Window
from attn_shared.selection import Policy
from attn_shared.spec import BuildConfig

__all__ = ["LayerKey", "attention_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKey:
    """What makes layers alike: one selection and one plan per step serve them all.

    Attributes:
        policy: who named which backend.
        is_checked: validate the contents of each batch.
        device, dtype: of query, key and value.
        num_heads, num_kv_heads: Hq and Hkv.
        head_size, head_size_v: D and Dv.
        scale: factor on q.k.
        window: visible keys (left, right).
        softcap: cap of the logits.
        has_sinks: the layers have a logit per head beside those of keys.
        is_causal: of a decoder; encoders never are.
        attn_type: over a cache or without one.
        block_size: tokens per block; None: the backend's choice.
        kv_cache_dtype: format of the cache.
        mla: widths of latent attention; None: ordinary heads.
    """

    policy: Policy
    is_checked: bool
    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    window: Window
    softcap: float | None
    has_sinks: bool
    is_causal: bool
    attn_type: AttentionType = AttentionType.DECODER
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    mla: MLADims | None = None

    def build_mla(self, kv_b_proj: torch.Tensor) -> MLAAttention:
        """Select a backend for latents and build a layer over the weight that expands them.

        Raises:
            NoBackendError: none serves it; the message has every reason.
        """
        return MLAAttention(
            num_heads=self.num_heads,
            scale=self.scale,
            kv_b_proj=kv_b_proj,
            dims=self.mla,
            dtype=self.dtype,
            device=self.device,
            backend=self.policy,
            config=BuildConfig(checked=self.is_checked),
            window=self.window,
            softcap=self.softcap,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def build(self, sinks: torch.Tensor | None) -> Attention:
        """Select a backend and build a layer.

        Raises:
            NoBackendError: none serves it; the message has every reason.
        """
        is_decoder = self.attn_type is AttentionType.DECODER
        return Attention(
            backend=self.policy,
            config=BuildConfig(checked=self.is_checked),
            device=self.device,
            dtype=self.dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            scale=self.scale,
            sinks=sinks,
            window=self.window,
            softcap=self.softcap,
            attn_type=self.attn_type,
            non_causal=is_decoder and not self.is_causal,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
        )


_ALIKE: dict[LayerKey, Attention] = {}
_WITH_SINKS: weakref.WeakKeyDictionary[torch.nn.Module, dict[LayerKey, Attention]] = (
    weakref.WeakKeyDictionary()
)


def attention_for(key: LayerKey, module: torch.nn.Module, sinks: torch.Tensor | None) -> Attention:
    """Return the layer that runs a module: shared by all alike, its own where it has sinks.

    Args:
        key: the layer's kind.
        module: the attention module.
        sinks: (Hq,), read anew at each call, since weights may have been loaded since.
    """
    if sinks is None:
        if key not in _ALIKE:
            _ALIKE[key] = key.build(None)
        return _ALIKE[key]
    own = _WITH_SINKS.setdefault(module, {})
    sinks = sinks.detach().to(device=key.device, dtype=torch.float32)
    if key not in own:
        own[key] = key.build(sinks)
    own[key].sinks = sinks
    return own[key]
