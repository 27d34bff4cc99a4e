"""Decode from CUDA graphs captured at padded batch sizes.

    python examples/cuda_graph_decode.py [BACKEND]

One graph for each size of batch; a step runs on the smallest that holds it, and the rest of that
batch is padding. Between replays only contents change, never addresses: queries, keys and values
are copied into the graph's own tensors, `StaticBatch.update` refreshes lengths, tables and slots,
and the builder's `build` what it made of them for the capture. Where there is no CUDA, or the
backend declares that it may not be captured, the same padded steps run without graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.backend import AttentionCGSupport
from attn_shared.layer import Attention, StepPlan
from attn_shared.spec import BuildConfig
from attn_shared.static_batch import StaticBatch, padded_size

__all__ = ["DecodeGraphs", "main"]

SIZES = (1, 2, 4, 8)
MAX_SEQ_LEN = 256
BLOCK_SIZE = 16
WARM_UPS = 3  # before a capture, on a stream of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A size's tensors, and what runs its step from them."""

    batch: StaticBatch
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    replay: Callable[[], object] | None


class DecodeGraphs:
    """One layer's decode steps, from a graph for each size of batch.

    The layer's builder serves these steps alone: what `build` refreshes is what graphs read.
    """

    def __init__(
        self, layer: Attention, kv_cache: Tensor, sizes: Iterable[int], max_seq_len: int
    ) -> None:
        """Capture every size, the largest first, so that the others find its memory.

        Args:
            layer: built with `BuildConfig(capture_sizes=sizes, ...)`.
            kv_cache: the cache that all steps read and write; it must stay where it is.
            sizes: requests of a batch, padding included.
            max_seq_len: the longest sequence that will come.
        """
        self._layer, self._kv_cache = layer, kv_cache
        self._max_seq_len = max_seq_len
        level = layer.builder.get_cudagraph_support(layer.config, layer.kv_cache_spec)
        self.is_captured = (
            layer.device.type == "cuda" and level >= AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        )
        self._pool = torch.cuda.graph_pool_handle() if self.is_captured else None
        self._sizes = {size: self._prepare(size) for size in sorted(sizes, reverse=True)}

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seq_lens: Sequence[int],
        block_table: Tensor,
    ) -> Tensor:
        """Write a step's keys and values, and attend.

        Args:
            query: (B, Hq, D), one row per request.
            key: (B, Hkv, D).
            value: (B, Hkv, Dv).
            seq_lens: keys of each request, this step's included.
            block_table: (B, M) int32 on the host.

        Returns:
            (B, Hq, Dv), valid until the next step of the same size.
        """
        used = self._sizes[padded_size(len(seq_lens), self._sizes)]
        for target, source in ((used.query, query), (used.key, key), (used.value, value)):
            target[: len(source)].copy_(source)
        common = used.batch.update(seq_lens, block_table)
        metadata = self._layer.builder.build(0, common)
        if used.replay is not None:
            used.replay()
        else:
            self._step(used, StepPlan(common=common, metadata=metadata))
        return used.output[: len(query)]

    def _prepare(self, size: int) -> _Captured:
        layer, spec = self._layer, self._layer.spec
        batch = StaticBatch(
            num_reqs=size,
            max_seq_len=self._max_seq_len,
            block_size=layer.kv_cache_spec.block_size if layer.kv_cache_spec else BLOCK_SIZE,
            device=layer.device,
        )

        def rows(heads: int, width: int) -> Tensor:
            return torch.zeros(size, heads, width, dtype=spec.dtype, device=layer.device)

        tensors = _Captured(
            batch=batch,
            query=rows(spec.num_heads, spec.head_size),
            key=rows(spec.num_kv_heads, spec.head_size),
            value=rows(spec.num_kv_heads, spec.head_size_v),
            output=rows(spec.num_heads, spec.head_size_v),
            replay=None,
        )
        return self._capture(tensors) if self.is_captured else tensors

    def _capture(self, tensors: _Captured) -> _Captured:
        common = tensors.batch.for_capture()
        metadata = self._layer.builder.build_for_cudagraph_capture(common)
        plan = StepPlan(common=common, metadata=metadata)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._step(tensors, plan)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(tensors, plan)
        return _Captured(
            batch=tensors.batch,
            query=tensors.query,
            key=tensors.key,
            value=tensors.value,
            output=tensors.output,
            replay=graph.replay,
        )

    def _step(self, tensors: _Captured, plan: StepPlan) -> None:
        self._layer.forward(
            tensors.query, tensors.key, tensors.value, self._kv_cache, plan, tensors.output
        )


def main(arguments: Sequence[str]) -> int:
    """Decode a few sequences that come and go, beside the same steps without padding or graphs."""
    is_cuda = torch.cuda.is_available()
    device = "cuda" if is_cuda else "cpu"
    layer = Attention(
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.bfloat16 if is_cuda else torch.float32,
        block_size=BLOCK_SIZE,
        device=device,
        backend=arguments[0] if arguments else None,
        config=BuildConfig(max_num_seqs=max(SIZES), max_model_len=MAX_SEQ_LEN, capture_sizes=SIZES),
    )
    blocks_each = MAX_SEQ_LEN // BLOCK_SIZE
    kv_cache = layer.allocate(1 + max(SIZES) * blocks_each)
    graphs = DecodeGraphs(layer, kv_cache, SIZES, MAX_SEQ_LEN)
    how = "from graphs" if graphs.is_captured else "without graphs"
    print(f"{layer.selection.chosen} on {device}, {how}")
    table = 1 + torch.arange(max(SIZES) * blocks_each, dtype=torch.int32).reshape(max(SIZES), -1)
    generator = torch.Generator(device).manual_seed(0)
    for length in range(1, 40):
        num_reqs = 1 + length % max(SIZES)
        shape = (num_reqs, 8 + 2 + 2, 64)
        rows = torch.randn(shape, generator=generator, device=device).to(layer.spec.dtype)
        query, key, value = rows.split((8, 2, 2), dim=1)
        output = graphs.run(query, key, value, [length] * num_reqs, table[:num_reqs])
        if not bool(output.isfinite().all()):
            print(f"step {length}: not finite")
            return 1
    print("39 steps of 1 to 8 requests")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
