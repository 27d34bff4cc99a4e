"""FlashInfer's trtllm-gen decode over latents, for Blackwell. Not run on hardware."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_cuda._mla_step import LatentStep, in_pages
from attn_cuda._vendor.flashinfer_mla import Interface
from attn_shared.errors import UnsupportedOptionError
from attn_shared.mla_edges import to_contract_lse
from attn_shared.quantization import quantize_fp8
from attn_shared.request import MLADims
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec

__all__ = ["TABLE_TOKENS", "TrtllmMLA", "trtllm_page_size"]

TABLE_TOKENS = 128
"""A row of the block table has room for a multiple of so many tokens."""

_PAGES = (64, 32)


def trtllm_page_size(block_size: int) -> int:
    """Return the kernel's page for blocks of a size: the largest that divides it.

    Raises:
        UnsupportedOptionError: none does.
    """
    for page in _PAGES:
        if block_size % page == 0:
            return page
    raise UnsupportedOptionError(
        f"block_size={block_size} is not served by trtllm-gen's kernels over latents; allowed: a "
        "multiple of 32 or 64."
    )


class TrtllmMLA:
    """The call of one layer. The kernel reads lengths on the device, and returns bfloat16."""

    def __init__(self, interface: Interface, spec: LayerSpec, dims: MLADims) -> None:
        """Bind what a layer never changes.

        Args:
            interface: of the installed release.
            spec: of the layer.
            dims: widths of the latent.

        Raises:
            UnsupportedOptionError: the release has no such call.
        """
        if interface.trtllm is None:
            raise UnsupportedOptionError(
                "this FlashInfer has no trtllm_batch_decode_with_kv_cache_mla.",
                hint="pip install -U flashinfer-python",
            )
        self._function = interface.trtllm
        self._dims, self._scale = dims, Scale(spec.scale)
        self._page = trtllm_page_size(_block_size(spec))
        self._fixed: dict[str, Any] = {
            "qk_nope_head_dim": dims.qk_nope_head_dim,
            "kv_lora_rank": dims.kv_lora_rank,
            "qk_rope_head_dim": dims.qk_rope_head_dim,
        }
        if "return_lse_base" in interface.trtllm_arguments:
            self._fixed["return_lse_base"] = "2"

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        step: LatentStep,
        workspace: Tensor,
        *,
        scales: tuple[float | Tensor, float | Tensor] | None = None,
        with_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; return output (T, H, rank) and LSE (H, T), a natural logarithm, if it is wanted.

        Args:
            query: (T, H, rank + rope), absorbed.
            kv_cache: (blocks, block_size, rank + rope).
            step: with query_len, the same for all requests.
            workspace: uint8, nobody else's and zero before its first use; the kernel leaves its
                counters zero.
            scales: of query and cache, of an fp8 cache alone.
            with_lse: the LSE is wanted.
        """
        query = self._scale.query(query)
        first: float | Tensor = self._scale.value
        second: float | Tensor = 1.0
        if scales is not None:
            query = quantize_fp8(query, scales[0], kv_cache.dtype)
            first, second = first * scales[0] * scales[1], scales[1]
            first, second = (_argument(factor) for factor in (first, second))
        result = self._function(
            query=query.view(step.num_reqs, step.query_len, *query.shape[1:]),
            kv_cache=in_pages(kv_cache, self._page).unsqueeze(1),
            workspace_buffer=workspace,
            block_tables=step.block_table,
            seq_lens=step.seq_lens,
            max_seq_len=step.max_seq_len,
            bmm1_scale=first,
            bmm2_scale=second,
            **({"return_lse": True} if with_lse else {}),
            **self._fixed,
        )
        if not with_lse:
            return result.flatten(0, 1), None
        output, lse = result
        return output.flatten(0, 1), to_contract_lse(lse.flatten(0, -2), is_log2=True).T


def _argument(factor: float | Tensor) -> float | Tensor:
    """Return a factor as the call takes it: a number, or float32 (1,), read on the device."""
    return factor.float().reshape(1) if isinstance(factor, Tensor) else factor


def _block_size(spec: LayerSpec) -> int:
    return 0 if spec.kv_cache_spec is None else spec.kv_cache_spec.block_size
