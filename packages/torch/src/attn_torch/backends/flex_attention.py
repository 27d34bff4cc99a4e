"""FLEX_ATTENTION: torch.nn.attention.flex_attention over a paged cache.

The block table becomes a block mask: each tile of query rows visits the pages that hold its
request's keys, and mask and score functions work on the absolute positions that those pages have
in the sequence. Compiled, the kernel reads the cache where it is (see `_flex_paged`). Uncompiled,
torch's own code for the operator runs over gathered keys (see `_flex_uncompiled`); it is right and
slow, and the only way to an LSE, and with it to sinks, on a CPU.

Why a CPU compiles on request alone, measured with torch 2.13 on 2 cores of a Xeon: a compilation
takes 5 to 20 s, needs a C++ compiler and serves one combination of padded sizes. Decoding 8
requests of 1k keys (32/8 heads of 128, bfloat16) then takes 24 ms per layer, uncompiled 56 ms,
where TORCH_SDPA takes 14 ms.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionLayer
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError
from attn_shared.inventory import Inventory
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec
from attn_torch import _flex_call
from attn_torch._flex_builder import FlexMetadata, FlexMetadataBuilder, FlexOptions
from attn_torch._flex_call import FlexResult
from attn_torch._flex_limits import NAME, capability_of, flex_capability
from attn_torch._flex_masks import Logits
from attn_torch._flex_tiles import TileRows
from attn_torch._visibility import Visibility

__all__ = [
    "FlexAttentionBackend",
    "FlexAttentionImpl",
    "FlexMetadata",
    "FlexMetadataBuilder",
    "FlexOptions",
]


class FlexAttentionImpl(AttentionImpl[FlexMetadata]):
    """Runs one layer."""

    can_return_lse = True

    def __init__(self, spec: LayerSpec) -> None:
        """Import flex_attention, and refuse a layer that the capability refuses."""
        super().__init__(spec)
        require_served(NAME, capability_of(), spec)
        self._checker = CallChecker(spec)
        self._visibility = Visibility(window=spec.window, chunk_size=spec.chunk_size)
        _flex_call.load()

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: FlexMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend; arguments as the base class has them.

        Raises:
            InvalidInputError: an argument does not fit the layer or the batch.
            UnsupportedOptionError: sinks, slopes or scales that would be dropped.
        """
        self.check_metadata(metadata)
        spec, num_rows = self.spec, metadata.batch.num_tokens
        self._checker.check_tensors(query, output, lse, num_rows)
        self._checker.check_layer(layer, query.device)
        keys, values = self._sources(query, key, value, kv_cache, metadata)
        if output is None:
            output = query.new_zeros((query.shape[0], spec.num_heads, spec.head_size_v))
        out = output[:num_rows]
        own_lse = lse
        if own_lse is None and layer.sinks is not None:
            own_lse = query.new_empty((spec.num_heads, num_rows), dtype=torch.float32)
        if own_lse is not None:
            own_lse = own_lse[:, :num_rows]
            own_lse.index_fill_(1, metadata.empty_rows, -torch.inf)
        out.index_fill_(0, metadata.empty_rows, 0.0)
        self._attend(layer, query, keys, values, metadata, out, own_lse)
        if layer.sinks is not None and own_lse is not None:
            _add_sinks(out, own_lse, layer.sinks)
        return output

    def check_metadata(self, metadata: FlexMetadata) -> None:
        """Refuse another backend's metadata, and masks that were planned for another layer."""
        hint = "build it with a FLEX_ATTENTION builder that was given this layer."
        if not isinstance(metadata, FlexMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "a FlexMetadata", hint=hint
            )
        planned = metadata.planner.visibility
        if planned != self._visibility:
            raise InvalidInputError.for_argument(
                "metadata", f"planned for {planned}", f"a plan for {self._visibility}", hint=hint
            )

    def _sources(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: FlexMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return where keys and values are read: views of the cache, or the call's own."""
        if metadata.table is None:
            num_keys = metadata.batch.num_keys
            return self._checker.check_keys(key, value, kv_cache, query.device, num_keys)
        kv_cache, cache_spec = self._checker.check_cache(kv_cache, query.device)
        self._checker.check_written_keys(key, value, query.device)
        views = cache_spec.split(kv_cache)
        last = metadata.table.num_spanned - 1
        if last >= kv_cache.shape[0]:
            raise InvalidInputError.for_argument(
                "block_table", f"naming block {last}", f"0 to {kv_cache.shape[0] - 1}"
            )
        return views.key, views.value

    def _attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: FlexMetadata,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write the rows that see a key, sinks apart."""
        slopes = layer.alibi_slopes
        logits = Logits(
            scale=self.spec.scale,
            softcap=self.spec.softcap,
            slopes=None if slopes is None else slopes.float(),
        )
        plan = metadata.compiled
        # The kernel that torch generates for a CPU returns no LSE.
        if plan is not None and (lse is None or query.device.type != "cpu"):
            result = plan.run(query, keys, values, logits, with_lse=lse is not None)
            _put(plan.rows, result, out, lse)
            return
        for dense in metadata.dense():
            _put(dense.rows, dense.run(query, keys, values, logits), out, lse)


def _put(rows: TileRows, result: FlexResult, out: Tensor, lse: Tensor | None) -> None:
    rows.put(result.output, out)
    if lse is not None and result.lse is not None:
        rows.put_lse(result.lse, lse)


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let a logit per head, with value zero, into the denominators.

    The denominator grows from exp(lse) to exp(lse) + exp(sink), so that the output shrinks by
    sigmoid(lse - sink); where nothing is seen the output is 0 already, and lse - sink may be NaN.

    Args:
        out: (T, Hq, Dv), written in place.
        lse: (Hq, T) float32, written in place.
        sinks: (Hq,).
    """
    sink = sinks.float().unsqueeze(1)
    share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink))
    out.copy_(out * share.T.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, sink.expand_as(lse)))


class FlexAttentionBackend(AttentionBackend):
    """torch's flex_attention, paged by block masks."""

    name: ClassVar[str] = NAME
    attn_api: ClassVar[str] = ">=1,<2"
    description: ClassVar[str] = "torch.nn.attention.flex_attention, paged by block masks"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what is served on `device`; torch alone decides."""
        return flex_capability(device.vendor)

    @staticmethod
    def get_impl_cls() -> type[FlexAttentionImpl]:
        """Return the class that runs one layer."""
        return FlexAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlexMetadataBuilder]:
        """Return the class that prepares each step."""
        return FlexMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import flex_attention, which brings torch's compiler."""
        _flex_call.load()
