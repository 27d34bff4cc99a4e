"""FlashInfer's planned decode over latents: kernels for Hopper (fa3), and older ones (fa2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_cuda._fi_pages import ListPages, page_indices, pages_of, require_pages
from attn_cuda._fi_wrappers import Planner
from attn_cuda._mla_step import LatentStep
from attn_cuda._vendor.flashinfer_mla import Interface
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec

__all__ = ["PlannedMLA"]

_LN_2 = math.log(2)


class PlannedMLA:
    """A wrapper with its buffers: for one captured batch size, or for all batches that are not.

    A plan overwrites what `run` reads, so that it holds until the next one alone.
    """

    def __init__(
        self,
        interface: Interface,
        spec: LayerSpec,
        kv_lora_rank: int,
        *,
        page_size: int,
        workspace: Tensor,
        backend: str,
        list_pages: ListPages,
        most_pages: int = 0,
        num_reqs: int = 0,
    ) -> None:
        """Make a wrapper.

        Args:
            interface: of the installed release.
            spec: of the layers, which share one plan.
            kv_lora_rank: width of the latent.
            page_size: tokens per page.
            workspace: uint8, of the device; wrappers that never run at the same time share one.
            backend: "fa3" or "fa2".
            list_pages: as `attn_shared.page_lists.page_indices`.
            most_pages: of a captured batch; 0: the batch is not captured.
            num_reqs: of a captured batch.
        """
        self._interface, self._spec, self._rank = interface, spec, kv_lora_rank
        self._page_size, self._device = page_size, workspace.device
        self._list_pages = list_pages
        self._scale = Scale(spec.scale)
        buffers: dict[str, Any] = {}
        if most_pages:
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr": self._buffer(num_reqs + 1),
                "kv_indptr": self._buffer(num_reqs + 1),
                "kv_indices": self._buffer(most_pages),
                "kv_len_arr": self._buffer(num_reqs),
            }
        wrapper = interface.wrapper(workspace, backend=backend, **buffers)
        self._planner = Planner(wrapper, workspace.device, {})

    def _buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)

    def plan(self, step: LatentStep, starts_cpu: Tensor, seq_lens_cpu: Tensor) -> None:
        """Plan a step; its lengths are on the host, and exact.

        Args:
            step: the decodes.
            starts_cpu: (B + 1,) int32, query_start_loc on the host.
            seq_lens_cpu: (B,) int32.
        """
        pages = pages_of(seq_lens_cpu, self._page_size)
        require_pages(seq_lens_cpu, step.block_table, self._page_size)
        rank, width = self._rank, self._spec.head_size
        options: dict[str, Any] = {
            "num_heads": self._spec.num_heads,
            "head_dim_ckv": rank,
            "head_dim_kpe": width - rank,
            "page_size": self._page_size,
            "causal": step.max_query_len > 1,
            "sm_scale": self._scale.value,
            "q_data_type": self._spec.dtype,
            "kv_data_type": self._spec.dtype,
        }
        tensors = {
            "qo_indptr": starts_cpu,
            "kv_indptr": pages.starts,
            "kv_indices": page_indices(step.block_table, pages, self._list_pages),
            "kv_len_arr": seq_lens_cpu,
        }
        if self._interface.csr is None:
            self._planner.plan(**tensors, **options)
        else:
            there = {name: tensor.to(self._device) for name, tensor in tensors.items()}
            layouts = {"query_layout": "split", "kv_cache_layout": "split", "lse_mode": "basee"}
            self._planner.plan(metadata=self._interface.csr(**there), **layouts, **options)

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        out: Tensor | None = None,
        *,
        with_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend by the last plan; return output (T, H, rank) and LSE (H, T), natural, if wanted.

        Args:
            query: (T, H, rank + rope), absorbed; T is what was planned.
            kv_cache: (pages, page_size, rank + rope).
            out: (T, H, rank) to write to.
            with_lse: the LSE is wanted.
        """
        query = self._scale.query(query)
        parts = (query[..., : self._rank], query[..., self._rank :])
        caches = (kv_cache[..., : self._rank], kv_cache[..., self._rank :])
        if self._interface.csr is not None:
            output, lse = self._planner.wrapper.run(
                query=parts, kv_cache=caches, out=out, return_lse=True, return_lse_base_on_e=True
            )
            return output, lse.T
        base = {"return_lse_base_on_e": True} if self._interface.has_natural_lse else {}
        result = self._planner.wrapper.run(
            q_nope=parts[0],
            q_pe=parts[1],
            ckv_cache=caches[0],
            kpe_cache=caches[1],
            out=out,
            return_lse=with_lse,
            **base,
        )
        if not with_lse:
            return result, None
        output, lse = result
        return output, (lse if base else lse * _LN_2).T
