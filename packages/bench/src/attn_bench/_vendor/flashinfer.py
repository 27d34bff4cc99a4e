"""FlashInfer's planned wrappers; kernels are compiled at first use, before anything is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_bench.direct import DirectCalls, first_of, itself, refuse_cache_dtype
from attn_shared.errors import UnsupportedOptionError
from attn_shared.probing import import_library

if TYPE_CHECKING:
    from attn_bench.paged import PeerInputs

__all__ = ["direct", "direct_for_graphs"]

_WORKSPACE_BYTES = 256 * 2**20  # the first use needs zeros
_FEW_QUERIES = 16  # up to here a batch is bound by memory, and its decode kernels serve it best
_PLAIN_GROUPS = (1, 2, 3, 4, 8)  # of its decode without tensor cores, whose LSE is right
_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_HEAD_SIZES = (64, 128, 256)  # 96 compiles in 0.6.13, and then runs into an illegal instruction


def direct_for_graphs(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return the decode wrapper as a captured one is planned: for every batch of this size.

    Its grid and its parts are those of the batch's size, and not of these lengths.

    Raises:
        ImportError: with the library's own words.
        UnsupportedOptionError: as `direct`, or a request brings several queries.
    """
    workload = layers[0].workload
    if workload.query_len != 1:
        raise UnsupportedOptionError(
            f"flashinfer_graph does not serve query_len={workload.query_len}; allowed: 1."
        )
    return _direct(layers, partial(_decode, for_graphs=True))


def direct(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return the decode wrapper on tensor cores for single queries, else the prefill wrapper.

    For an LSE other kernels are taken, since those on tensor cores sum rounded weights.

    The plan is made once for all layers, as the library means it. To plan again puts new tensors
    in the place of those that a captured run reads, so that plans are timed on a second wrapper.

    Raises:
        ImportError: with the library's own words.
        UnsupportedOptionError: a head size, a cache in a format, or an LSE that it does not serve.
    """
    return _direct(layers, _decode if layers[0].workload.query_len == 1 else _prefill)


def _direct(layers: Sequence[PeerInputs], make: Callable[..., Any]) -> DirectCalls:
    batch = layers[0]
    workload = batch.workload
    _refuse_head_size(workload.heads.head_size)
    refuse_cache_dtype("flashinfer", workload, _CACHE_DTYPES)
    _refuse_rounded_lse(batch)
    library = import_library("flashinfer")
    scratch = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=batch.query.device)
    wrapper, plan = make(library, batch, scratch)
    plan()
    _, plan_again = make(library, batch, scratch)
    return DirectCalls(
        calls=tuple(partial(wrapper.run, **_arguments(layer)) for layer in layers),
        tokens=first_of if workload.returns_lse else itself,
        lse=_natural_lse if workload.returns_lse else None,
        plan=plan_again,
    )


def _refuse_head_size(head_size: int) -> None:
    if head_size not in _HEAD_SIZES:
        raise UnsupportedOptionError(
            f"flashinfer does not serve head_size={head_size}; "
            f"allowed: {', '.join(map(str, _HEAD_SIZES))}."
        )


def _refuse_rounded_lse(batch: PeerInputs) -> None:
    """Refuse an LSE where only kernels that sum rounded weights are there: it is 1e-3 off."""
    workload = batch.workload
    group = workload.heads.num_heads // workload.heads.num_kv_heads
    is_fp8 = batch.key_cache.dtype.itemsize == 1
    if workload.returns_lse and (is_fp8 or group not in _PLAIN_GROUPS):
        raise UnsupportedOptionError(
            f"flashinfer has no LSE of {group} query heads per kv head over a cache of "
            f"{batch.key_cache.dtype}; allowed: {', '.join(map(str, _PLAIN_GROUPS))}, in 16 bits."
        )


def _decode(
    library: Any, batch: PeerInputs, scratch: Tensor, *, for_graphs: bool = False
) -> tuple[Any, Callable[[], object]]:
    starts, pages, last_page_lens = _pages(batch)
    buffers = {}
    if for_graphs:
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": starts.to(pages.device),
            "paged_kv_indices_buffer": torch.empty_like(pages),
            "paged_kv_last_page_len_buffer": last_page_lens.to(pages.device),
        }
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        scratch,
        kv_layout="NHD",
        use_tensor_cores=not batch.workload.returns_lse,
        **buffers,
    )
    heads = batch.workload.heads
    plan = partial(
        wrapper.plan,
        indptr=starts,
        indices=pages,
        last_page_len=last_page_lens,
        num_qo_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_size,
        page_size=batch.block_size,
        **_plan_options(batch),
    )
    return wrapper, plan


def _prefill(library: Any, batch: PeerInputs, scratch: Tensor) -> tuple[Any, Callable[[], object]]:
    workload = batch.workload
    is_few = workload.query_len <= _FEW_QUERIES and not workload.returns_lse
    backend = "fa2" if is_few else "auto"
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(scratch, kv_layout="NHD", backend=backend)
    starts, pages, last_page_lens = _pages(batch)
    heads = batch.workload.heads
    plan = partial(
        wrapper.plan,
        qo_indptr=batch.query_start_loc.cpu(),
        paged_kv_indptr=starts,
        paged_kv_indices=pages,
        paged_kv_last_page_len=last_page_lens,
        num_qo_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim_qk=heads.head_size,
        page_size=batch.block_size,
        causal=True,
        **_plan_options(batch),
    )
    return wrapper, plan


def _plan_options(batch: PeerInputs) -> dict[str, Any]:
    return {
        "window_left": batch.window[0],
        "q_data_type": batch.query.dtype,
        "kv_data_type": batch.key_cache.dtype,
        "sm_scale": batch.scale,
    }


def _pages(batch: PeerInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return page starts (B + 1) and last page lengths (B) on the host, pages on the device."""
    size = batch.block_size
    counts = [-(-length // size) for length in batch.workload.seq_lens]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = [row[:count] for row, count in zip(batch.block_table, counts, strict=True)]
    last = [(length - 1) % size + 1 for length in batch.workload.seq_lens]
    return starts, torch.cat(rows), torch.tensor(last, dtype=torch.int32)


def _arguments(layer: PeerInputs) -> dict[str, Any]:
    """Return the keywords of one layer's run."""
    workload = layer.workload
    return {
        "q": layer.query,
        "paged_kv_cache": (layer.key_cache, layer.value_cache),
        "out": None if workload.own_output else layer.output,
        "return_lse": workload.returns_lse,
    }


def _natural_lse(result: Any) -> Tensor:
    """Return (Hq, T) in natural logarithm; the library's is (T, Hq) and of base 2."""
    return itself(result[1]).T * math.log(2.0)
