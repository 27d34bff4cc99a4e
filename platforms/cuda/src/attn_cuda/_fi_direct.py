"""Parts of a step on TensorRT-LLM's kernels, which read the block table and are not planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_cuda._fi_key import Call, PlanKey
from attn_cuda._fi_parts import deliver_lse
from attn_shared.quantization import quantize_fp8
from attn_shared.workspace import Workspace

__all__ = ["DirectPart", "Keyless", "zeroed_workspace"]

_WORKSPACE_BYTES = 136 * 2**20
"""8 MiB of counters, which begin at zero and come back to it, and what the library recommends."""

_ZEROED: dict[torch.device, Workspace] = {}


def zeroed_workspace(device: torch.device) -> Tensor:
    """Return the one buffer of a device for these kernels; nothing else may write into it."""
    if device not in _ZEROED:
        _ZEROED[device] = Workspace(device, num_bytes=_WORKSPACE_BYTES)
    return _ZEROED[device].get(_WORKSPACE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keyless:
    """Rows that see no key, whose output these kernels leave unspecified.

    Attributes:
        rows: (n,) bool of the part's rows, on the device; or (m,) int64, which of them.
    """

    rows: Tensor

    def blank(self, output: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        """Set their rows of output (n, Hq, D) to 0 and of the LSE (Hq, n) to that of no key."""
        if self.rows.dtype is torch.bool:
            output.masked_fill_(self.rows[:, None, None], 0.0)
            if lse is not None:
                empty = self._empty(lse, sinks).expand_as(lse)
                lse.copy_(torch.where(self.rows[None], empty, lse))
            return
        output.index_fill_(0, self.rows, 0.0)
        if lse is not None:
            empty = self._empty(lse, sinks).expand(len(lse), len(self.rows))
            lse.index_copy_(1, self.rows, empty)

    @staticmethod
    def _empty(lse: Tensor, sinks: Tensor | None) -> Tensor:
        return lse.new_full((1, 1), -math.inf) if sinks is None else sinks[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DirectPart:
    """Rows that one call serves.

    Attributes:
        key: what is fixed for all layers.
        kernels: "xqa" or "trtllm-gen".
        kernel: the library's call for the phase.
        first, last: rows of the step, the last excluded.
        block_table: (B, M) int32, contiguous.
        seq_lens: (B,) int32 on the device.
        max_seq_len: host bound.
        queries_per_request: rows of each request in a decode; 0 for a prefill.
        max_query_len: host bound of a prefill.
        causal: bottom-right aligned, of a prefill.
        query_start_loc: (B + 1,) int32 on the device, of a prefill.
        key_start_loc: (B + 1,) int32 on the device, of a prefill.
        keyless: rows without keys, or None where there are none.
    """

    key: PlanKey
    kernels: str
    kernel: Callable[..., Any]
    first: int
    last: int
    block_table: Tensor
    seq_lens: Tensor
    max_seq_len: int
    queries_per_request: int
    max_query_len: int = 1
    causal: bool = True
    query_start_loc: Tensor | None = None
    key_start_loc: Tensor | None = None
    keyless: Keyless | None = None

    def run(self, call: Call) -> None:
        """Call the kernels."""
        query = call.query[self.first : self.last].contiguous()
        output = call.output[self.first : self.last]
        scaling = call.scaling
        factor = self.key.scale * scaling.k_scale
        if self.kernels == "trtllm-gen" and self.key.is_quantized:  # its kernels take both alike
            query = quantize_fp8(query, scaling.q_scale, torch.float8_e4m3fn)
            factor *= scaling.q_scale
        options: dict[str, Any] = {
            "query": query,
            "kv_cache": call.cache,
            "workspace_buffer": zeroed_workspace(query.device),
            "block_tables": self.block_table,
            "seq_lens": self.seq_lens,
            "bmm1_scale": factor,
            "bmm2_scale": scaling.v_scale,
            "window_left": self.key.window_left,
            "out": output,
            "sinks": call.sinks,
            "kv_layout": str(self.key.layout),
        }
        if call.cache_scales is not None:
            options["kv_cache_sf"] = call.cache_scales
        if call.lse is not None:
            options["return_lse"] = True
        found = self._decode(options) if self.queries_per_request else self._context(options)
        if call.lse is not None:
            deliver_lse(call.lse, self.first, self.last, found[1])
        if self.keyless is not None:
            lse = None if call.lse is None else call.lse[:, self.first : self.last]
            self.keyless.blank(output, lse, call.sinks)

    def _decode(self, options: dict[str, Any]) -> Any:
        return self.kernel(
            **options,
            max_seq_len=self.max_seq_len,
            q_len_per_req=self.queries_per_request,
            backend=self.kernels,
        )

    def _context(self, options: dict[str, Any]) -> Any:
        return self.kernel(
            **options,
            max_q_len=self.max_query_len,
            max_kv_len=self.max_seq_len,
            batch_size=len(self.seq_lens),
            cum_seq_lens_q=self.query_start_loc,
            cum_seq_lens_kv=self.key_start_loc,
            causal=self.causal,
        )
