"""FlashAttention 3 over latents: the key is the rope part, the value the latent, a key too by qv.

Of a query (T, H, rank + rope) the kernel gets the rope part as `q` and the rest as `qv`, whose
products with the values are added to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from attn_cuda._fa_calls import schedule
from attn_cuda._fa_providers import Provider
from attn_cuda._fa_step import KeyStep
from attn_cuda._vendor import flash_attn_3, vllm_flash_attn
from attn_shared.capability import Reason
from attn_shared.inventory import Inventory, VendorEntry
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec

__all__ = ["INTERFACES", "LIBRARIES", "FlashAttnMLACall", "latent_schedule", "resolve_provider"]

LIBRARIES = ("vllm_flash_attn_3", "flash_attn_3")
"""Libraries with the argument, the one that is taken first first."""

_ARGUMENTS = MappingProxyType(
    {
        "vllm_flash_attn_3": "flash_attn_varlen_func.q_v",
        "flash_attn_3": "flash_attn_with_kvcache.qv",
    }
)
_SCHEDULES = MappingProxyType(
    {"vllm_flash_attn_3": "flash_attn_varlen_func.scheduler_metadata", "flash_attn_3": ""}
)


def resolve_provider(inventory: Inventory) -> Provider | Reason:
    """Return the build that has kernels for latents, or why none has."""
    refused = []
    for name in LIBRARIES:
        entry = inventory.get(name)
        problem = _problem(entry)
        if problem is None:
            return _provider(entry)
        refused.append(f"{name}: {problem}")
    hint = "; ".join(
        inventory.get(name).describe()
        for name in LIBRARIES
        if not inventory.get(name).is_usable and inventory.get(name).install
    )
    return Reason(code="flash_attn_qv", value="none", allowed=" | ".join(refused), hint=hint)


def _problem(entry: VendorEntry) -> str | None:
    if not entry.is_usable:
        return str(entry.status)
    build = entry.build
    if build is None:
        return None
    if _ARGUMENTS[entry.name] not in build.optional_arguments:
        return f"{entry.version} has no {_ARGUMENTS[entry.name]}"
    if build.flag("hdimdiff64") == "off":
        return (
            f"{entry.version} was built without heads of 64 beside values of 512 "
            "(FLASHATTENTION_DISABLE_HDIMDIFF64)"
        )
    return None


def _provider(entry: VendorEntry) -> Provider:
    arguments = frozenset() if entry.build is None else entry.build.optional_arguments
    return Provider(
        library=entry.name,
        version=3,
        release=entry.version,
        writes_out=entry.name == "vllm_flash_attn_3",
        has_schedule=_SCHEDULES[entry.name] in arguments,
    )


INTERFACES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"vllm_flash_attn_3": vllm_flash_attn.interface, "flash_attn_3": flash_attn_3.interface}
)
"""What imports each of them."""


class FlashAttnMLACall:
    """The call of one layer, by the library that was resolved for it."""

    def __init__(self, provider: Provider, spec: LayerSpec, kv_lora_rank: int) -> None:
        """Bind what a layer never changes.

        Raises:
            ImportError: the library does not load, in its own words.
        """
        module = INTERFACES[provider.library]()
        self._rank = kv_lora_rank
        self._scale = Scale(spec.scale)
        is_vllm = provider.library == "vllm_flash_attn_3"
        self._call = self._of_vllm if is_vllm else self._of_upstream
        self._function = (
            module.flash_attn_varlen_func if is_vllm else module.flash_attn_with_kvcache
        )

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        step: KeyStep,
        out: Tensor | None = None,
        *,
        with_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, and return output (T, H, kv_lora_rank) and, if it is wanted, LSE (H, T).

        Args:
            query: (T, H, kv_lora_rank + rope), absorbed.
            kv_cache: (blocks, block_size, kv_lora_rank + rope).
            step: lengths and block table.
            out: (T, H, kv_lora_rank) to write to, for the library that takes one.
            with_lse: the LSE is wanted.
        """
        query = self._scale.query(query)
        latent, rope = query[..., : self._rank], query[..., self._rank :]
        entry = kv_cache.unsqueeze(2)
        keys = (entry[..., self._rank :], entry[..., : self._rank])
        result = self._call(rope, latent, keys, step, out, with_lse)
        return (result[0], result[1]) if with_lse else (result, None)

    def _of_vllm(
        self,
        rope: Tensor,
        latent: Tensor,
        keys: tuple[Tensor, Tensor],
        step: KeyStep,
        out: Tensor | None,
        with_lse: bool,
    ) -> Any:
        return self._function(
            q=rope,
            k=keys[0],
            v=keys[1],
            q_v=latent,
            max_seqlen_q=step.max_query_len,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_k=step.max_key_len,
            seqused_k=step.key_lens,
            block_table=step.block_table,
            softmax_scale=self._scale.value,
            causal=step.causal,
            return_softmax_lse=with_lse,
            out=out,
            scheduler_metadata=step.schedule,
            num_splits=step.num_splits,
            fa_version=3,
        )

    def _of_upstream(
        self,
        rope: Tensor,
        latent: Tensor,
        keys: tuple[Tensor, Tensor],
        step: KeyStep,
        out: Tensor | None,
        with_lse: bool,
    ) -> Any:
        return self._function(
            q=rope,
            k_cache=keys[0],
            v_cache=keys[1],
            qv=latent,
            cache_seqlens=step.key_lens,
            page_table=step.block_table,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_q=step.max_query_len,
            softmax_scale=self._scale.value,
            causal=step.causal,
            num_splits=step.num_splits,
            return_softmax_lse=with_lse,
        )


def latent_schedule(
    provider: Provider, spec: LayerSpec, step: KeyStep, *, page_size: int, kv_lora_rank: int
) -> Tensor:
    """Return the schedule of a step, int32; see `attn_cuda._fa_calls.schedule`.

    Args:
        provider: one that has schedules.
        spec: of the layers.
        step: with lengths and a block table.
        page_size: tokens per page.
        kv_lora_rank: width of the latent.
    """
    rope = spec.head_size - kv_lora_rank
    widths = replace(spec, head_size=rope, head_size_v=kv_lora_rank, mla=None)
    return schedule(provider, widths, step, page_size=page_size, dtype=spec.dtype)
