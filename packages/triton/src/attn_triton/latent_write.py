"""Write a step's latents and rope parts into a paged cache with one Triton launch.

Means what `attn_shared.kv_write.concat_and_cache_mla` means, and refuses the same calls with the
same words. To the kernel an entry is one head whose value, the rope part, follows its key.
"""

from __future__ import annotations

from torch import Tensor

from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.kv_write import check_latent_write
from attn_triton.kv_write import Scale, WritePlan, WriteTarget, plan_write, scale_facts

__all__ = ["concat_and_cache_mla"]

_MOST_PLANS = 1024
_PLANS: dict[tuple[object, ...], WritePlan] = {}


def concat_and_cache_mla(
    kv_cache: Tensor,
    spec: MLAAttentionSpec,
    latent: Tensor,
    rope: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float | Tensor = 1.0,
) -> None:
    """Write latents and rope parts as cache entries, on the current stream.

    The first call with tensors of new strides or dtypes compiles, and cannot be captured in a
    graph. Where two tokens have one slot, either may be what is kept.

    Args:
        kv_cache: a cache of `spec`; any strides that `spec.split` takes.
        spec: the cache's format.
        latent: (T, kv_lora_rank), any strides.
        rope: (T, qk_rope_head_dim), any strides.
        slot_mapping: (T,) int64; -1 is not written. Rows past its length are ignored.
        scale: stored = entry / scale for an fp8 cache, 1 for every other.

    Raises:
        InvalidInputError: a shape, dtype, device or scale does not fit.
        UnsupportedOptionError: a format that is not written.
    """
    shapes = latent.shape, rope.shape
    facts = (
        *(spec, kv_cache.shape, kv_cache.stride(), kv_cache.device),
        *(shapes[0][1:], latent.stride(), latent.dtype, latent.device),
        *(shapes[1][1:], rope.stride(), rope.dtype, rope.device),
        *(slot_mapping.dtype, slot_mapping.stride(), slot_mapping.device, scale_facts(scale)),
    )
    count = slot_mapping.numel()
    plan = _PLANS.get(facts)
    if plan is None or shapes[0][0] < count or shapes[1][0] < count:
        plan = _plan(kv_cache, spec, latent, rope, slot_mapping, scale)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[facts] = plan
    plan.run(kv_cache, latent, rope, slot_mapping, scale, scale)


def _plan(
    kv_cache: Tensor,
    spec: MLAAttentionSpec,
    latent: Tensor,
    rope: Tensor,
    slot_mapping: Tensor,
    scale: Scale,
) -> WritePlan:
    views = check_latent_write(kv_cache, spec, latent, rope, slot_mapping, scale=scale)
    block, token, head = map(int, views.key.stride()[:3])
    target = WriteTarget(
        num_heads=1,
        block_size=spec.block_size,
        sizes=(spec.kv_lora_rank, spec.head_size - spec.kv_lora_rank),
        strides=(block, token, head, spec.kv_lora_rank),
        dtype=spec.dtype,
        has_inline_scales=False,
        is_quantized=spec.is_quantized,
        device=kv_cache.device,
    )
    rows = latent.unsqueeze(1), rope.unsqueeze(1)
    return plan_write(target, *rows, slot_mapping, scale, scale)
