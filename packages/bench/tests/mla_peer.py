"""A direct call over latents, as a vendor's would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from attn_bench.direct import DirectCalls
from attn_bench.paged import PeerInputs
from attn_shared.reference import mla_decode


def direct(inputs: Sequence[PeerInputs]) -> DirectCalls:
    """Return a call per layer."""

    def call_of(own: PeerInputs) -> Callable[[], Tensor]:
        def call() -> Tensor:
            found = mla_decode(
                own.query,
                own.key_cache.squeeze(2),
                scale=own.scale,
                kv_lora_rank=own.value_cache.shape[-1],
                query_start_loc=own.query_start_loc,
                seq_lens=own.seq_lens,
                block_table=own.block_table,
            )
            return found.output.to(own.query.dtype)

        return call

    return DirectCalls(calls=tuple(call_of(own) for own in inputs))
