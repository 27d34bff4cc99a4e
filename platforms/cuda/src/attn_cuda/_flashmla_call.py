"""FlashMLA's dense decode, of both distributions that bring the module flash_mla."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attn_cuda._mla_schedules import Schedules
from attn_cuda._mla_step import LatentStep, in_pages
from attn_cuda._vendor import flash_mla
from attn_shared.inventory import Inventory
from attn_shared.quantization import quantize_fp8
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec

__all__ = ["PAGE_SIZE", "FlashMLACall", "FlashMLASchedules", "kernels_of", "schedules"]

PAGE_SIZE = 64

FlashMLASchedules = Schedules[Any]


class FlashMLACall:
    """The call of one layer.

    tokenspeed-flashmla has kernels for 16-bit caches on Hopper alone. sgl-flash-mla carries them
    as a second, older set, which has to be asked for in each call (`use_legacy`), and reads
    float8_e4m3fn as well.
    """

    def __init__(self, spec: LayerSpec, kv_lora_rank: int) -> None:
        """Bind what a layer never changes.

        Raises:
            ImportError: the library does not load, in its own words.
        """
        self._library = flash_mla.interface()
        self._function: Callable[..., tuple[Tensor, Tensor]] = self._library.flash_mla_with_kvcache
        self._rank = kv_lora_rank
        self._scale = Scale(spec.scale)
        self._fixed: dict[str, Any] = {
            "head_dim_v": kv_lora_rank,
            "softmax_scale": self._scale.value,
        }
        self._takes_scales = flash_mla.has_choice(self._library)
        if self._takes_scales:
            self._fixed["use_legacy"] = True

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        step: LatentStep,
        schedules: FlashMLASchedules,
        *,
        scales: tuple[Tensor, Tensor] | None = None,
        with_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, and return output (T, H, kv_lora_rank) and LSE (H, T), +inf in rows without keys.

        Args:
            query: (T, H, kv_lora_rank + rope), absorbed.
            kv_cache: (blocks, block_size, kv_lora_rank + rope), blocks of whole pages.
            step: with query_len, the same for all requests.
            schedules: of this step.
            scales: of query and cache, each (1,) float32, of an fp8 cache alone.
            with_lse: return the LSE, which the library lays out otherwise and always makes.
        """
        query = self._scale.query(query)
        more = self._fixed
        if scales is not None:
            query = quantize_fp8(query, scales[0], kv_cache.dtype)
            more = {**more, "descale_q": scales[0], "descale_k": scales[1]}
        schedule = schedules.of(self, query.device)
        if scales is not None and not schedule.have_initialized:
            self._plan_fp8(schedule, query, step)
        output, lse = self._function(
            q=query.view(step.num_reqs, step.query_len, *query.shape[1:]),
            k_cache=in_pages(kv_cache, PAGE_SIZE).unsqueeze(2),
            block_table=step.block_table,
            cache_seqlens=step.seq_lens,
            tile_scheduler_metadata=schedule,
            causal=step.query_len > 1,
            **({"is_fp8_kvcache": scales is not None} if self._takes_scales else {}),
            **more,
        )
        return output.flatten(0, 1), lse.transpose(0, 1).flatten(1) if with_lse else None

    def _plan_fp8(self, schedule: Any, query: Tensor, step: LatentStep) -> None:
        """Fill the schedule of a quantised cache, which the call does not by itself."""
        parts = self._library.get_mla_decoding_metadata(
            seqlens_k=step.seq_lens,
            num_q_tokens_per_head_k=step.query_len * query.shape[1],
            h_k=1,
            is_fp8_kvcache=True,
            use_legacy=True,
        )
        schedule.tile_scheduler_metadata, schedule.num_splits = parts


def kernels_of(inventory: Inventory) -> tuple[str, str]:
    """Return which of the library's kernels decode, in words, and why those."""
    entry = inventory.get("flash_mla")
    build = entry.build
    release = " ".join(filter(None, (entry.distribution, entry.version))) or "flash_mla"
    if build is not None and build.flag("legacy") is not None:
        return f"the second set of {release} (use_legacy)", "its first has no dense decode here"
    return f"the dense kernels of {release}", f"pages of {PAGE_SIZE} tokens"


def schedules() -> FlashMLASchedules:
    """Return the schedules of a step, which its first call fills."""
    library = flash_mla.interface()
    return Schedules(lambda: library.get_mla_metadata()[0])
