"""Direct calls that a backend is measured beside.

torch's own are named here, those of the vendors' libraries in `attn_bench.vendor_peers`. Any other
call is a function of one's own, named as "module:function", which takes `PeerInputs` and returns
the call:

    def peer(inputs: PeerInputs) -> Callable[[], Tensor]:
        return lambda: vendor.paged_decode(inputs.query, inputs.key_cache, ...)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_bench.contenders import BackendContender, Contender, Copy, Prepared
from attn_bench.counting import count
from attn_bench.inputs import LayerTensors, Step
from attn_bench.paged import PeerInputs, paged_copy, paged_step, peer_inputs, refuse_options
from attn_bench.vendor_peers import VENDOR_PEERS, VendorContender
from attn_bench.workloads import Workload
from attn_shared.errors import InvalidInputError, UnknownNameError, UnsupportedOptionError
from attn_shared.kv_cache import KVViews
from attn_shared.kv_write import gather_rows

__all__ = [
    "PEERS",
    "FoldedSdpaContender",
    "FunctionContender",
    "GatheredSdpaContender",
    "PeerInputs",
    "ReadContender",
    "SdpaContender",
    "contender_named",
    "known_peers",
]

_VLLM_CPU = "vllm-cpu"


def _mask(query_len: int, key_len: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """Return (attn_mask, is_causal) of a bottom-right causal call; torch's own is top-left."""
    if query_len == 1:
        return None, False
    if query_len == key_len:
        return None, True
    rows = torch.arange(query_len, device=device)[:, None] + key_len - query_len
    return torch.arange(key_len, device=device)[None, :] <= rows, False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dense:
    """Requests of one length: query (R, Hq, Tq, D), key and value (R, Hkv, Tk, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool

    def attend(self) -> Tensor:
        """Return (R, Hq, Tq, D)."""
        return scaled_dot_product_attention(
            self.query,
            self.key,
            self.value,
            attn_mask=self.mask,
            is_causal=self.is_causal,
            enable_gqa=True,
        )

    def attend_folded(self) -> Tensor:
        """Return (R, Hq, 1, D) of decodes, whose heads (R, Hkv, G, D) are rows of one product."""
        num_kv_heads = self.key.shape[1]
        rows = self.query.squeeze(2).unflatten(1, (num_kv_heads, -1))
        result = scaled_dot_product_attention(rows, self.key, self.value)
        return result.flatten(1, 2).unsqueeze(2)


class SdpaContender(Contender):
    """torch's SDPA on keys and values that lie dense already: no paging is paid for.

    Requests of unequal lengths are called one by one. Grouped-query heads go through enable_gqa, as
    a caller without attn would write it.
    """

    name = "torch.sdpa"
    attend: Callable[[_Dense], Tensor] = staticmethod(_Dense.attend)

    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        """Lay random numbers out dense."""
        refuse_options(self.name, workload)
        generator = torch.Generator(device).manual_seed(0)
        copies = tuple(_dense_copy(workload, generator, self.attend) for _ in range(num_copies))
        return Prepared(
            name=self.name, copies=copies, notes=(f"{self.name}: keys lie dense, nothing is paged",)
        )


class FoldedSdpaContender(SdpaContender):
    """The same for decodes, the query heads of a kv head as query rows: keys are read once."""

    name = "torch.sdpa_folded"
    attend = staticmethod(_Dense.attend_folded)

    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        """Lay random numbers out dense.

        Raises:
            UnsupportedOptionError: a request has more than one query token.
        """
        if workload.query_len != 1:
            raise UnsupportedOptionError(
                f"{self.name} folds no query_len={workload.query_len}; allowed: 1."
            )
        return super().prepare(workload, device, num_copies, is_captured=is_captured)


def _dense_copy(
    workload: Workload, generator: torch.Generator, attend: Callable[[_Dense], Tensor]
) -> Copy:
    requests = workload.batch if workload.is_uniform else 1
    each = workload.lengths[:1] if workload.is_uniform else workload.lengths
    parts = [_dense(workload, requests, *lengths, generator) for lengths in each]

    def keys(request: int) -> KVViews:
        part, row = (parts[0], request) if workload.is_uniform else (parts[request], 0)
        return KVViews(part.key[row].transpose(0, 1), part.value[row].transpose(0, 1))

    return Copy(
        call=lambda: [attend(part) for part in parts],
        tokens=_token_major,
        query=lambda: _token_major([part.query for part in parts]),
        keys=keys,
        lengths=workload.lengths,
    )


def _dense(
    workload: Workload, count: int, query_len: int, seq_len: int, generator: torch.Generator
) -> _Dense:
    heads, device = workload.heads, generator.device
    query, key, value = (
        torch.randn(
            (count, num_heads, length, heads.head_size), generator=generator, device=device
        ).to(workload.dtype)
        for num_heads, length in (
            (heads.num_heads, query_len),
            (heads.num_kv_heads, seq_len),
            (heads.num_kv_heads, seq_len),
        )
    )
    mask, is_causal = _mask(query_len, seq_len, device)
    return _Dense(query=query, key=key, value=value, mask=mask, is_causal=is_causal)


def _token_major(parts: list[Tensor]) -> Tensor:
    """Return (T, Hq, D) of parts (R, Hq, Tq, D)."""
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])


class GatheredSdpaContender(Contender):
    """torch's SDPA per request over gathered blocks: what a caller with paged KV would write."""

    name = "torch.sdpa_gathered"

    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        """Fill paged caches in the default layout."""
        refuse_options(self.name, workload)
        step = paged_step(workload, device, num_copies)
        copies = tuple(
            paged_copy(workload, step, layer, _gathered_call(workload, step, layer))
            for layer in step.layers
        )
        return Prepared(name=self.name, copies=copies, block_size=step.spec.block_size)


def _gathered_call(workload: Workload, step: Step, layer: LayerTensors) -> Callable[[], Tensor]:
    views, table = step.spec.split(layer.kv_cache), step.common.block_table
    masks = [_mask(*lengths, layer.query.device) for lengths in workload.lengths]
    if table is None:
        raise TypeError("a step of make_step has a block table")

    def call() -> Tensor:
        start = 0
        for request, (query_len, seq_len) in enumerate(workload.lengths):
            mask, is_causal = masks[request]
            query, key, value = (
                rows.transpose(0, 1).unsqueeze(0)
                for rows in (
                    layer.query[start : start + query_len],
                    gather_rows(views.key, table[request], seq_len),
                    gather_rows(views.value, table[request], seq_len),
                )
            )
            result = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=True
            )
            layer.output[start : start + query_len] = result[0].transpose(0, 1)
            start += query_len
        return layer.output

    return call


class FunctionContender(Contender):
    """A function of one's own: handed the inputs, it returns the call that is timed."""

    def __init__(self, name: str) -> None:
        """Import it.

        Args:
            name: "module:function".

        Raises:
            UnknownNameError: there is no such module, or no such function in it.
        """
        self.name = name
        module, _, attribute = name.partition(":")
        try:
            self._make = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnknownNameError(
                f"peer {name!r} cannot be imported: {error}.",
                hint="allowed: module:function, with the module's folder on PYTHONPATH.",
            ) from error
        if not callable(self._make):
            raise InvalidInputError.for_argument("peer", repr(name), "the name of a function")

    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        """Fill caches and hand them to the function, one by one."""
        refuse_options(self.name, workload, is_quantised=True, has_window=True)
        step = paged_step(workload, device, num_copies)
        copies = tuple(
            paged_copy(workload, step, layer, self._make(peer_inputs(workload, step, layer)))
            for layer in step.layers
        )
        return Prepared(name=self.name, copies=copies, block_size=step.spec.block_size)


class ReadContender(Contender):
    """A sum over as many bytes as the call must move: what reading alone takes."""

    name = "torch.read"

    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        """Fill memory with random numbers."""
        num_elements = -(-count(workload).num_bytes // torch.float32.itemsize)
        generator = torch.Generator(device).manual_seed(0)
        buffers = [
            torch.rand(num_elements, generator=generator, device=device) for _ in range(num_copies)
        ]
        return Prepared(
            name=self.name,
            copies=tuple(_read_copy(workload, buffer) for buffer in buffers),
            notes=("torch.read: a sum over as many bytes, and no attention",),
            is_attention=False,
        )


def _read_copy(workload: Workload, buffer: Tensor) -> Copy:
    return Copy(
        call=buffer.sum,
        tokens=lambda total: total,
        query=lambda: buffer,
        keys=lambda request: KVViews(buffer, buffer),
        lengths=workload.lengths,
    )


def _vllm_cpu() -> Contender:
    from attn_bench._vendor.vllm_cpu import VllmCpuContender

    return VllmCpuContender()


PEERS: Mapping[str, Callable[[], Contender]] = MappingProxyType(
    {
        SdpaContender.name: SdpaContender,
        FoldedSdpaContender.name: FoldedSdpaContender,
        GatheredSdpaContender.name: GatheredSdpaContender,
        ReadContender.name: ReadContender,
        **{peer.name: partial(VendorContender, peer) for peer in VENDOR_PEERS},
        _VLLM_CPU: _vllm_cpu,
    }
)
"""Direct calls by name: torch's, and those of the vendors' libraries."""


_TORCH_WORDS = {
    SdpaContender.name: "scaled_dot_product_attention over keys that lie dense already",
    FoldedSdpaContender.name: "the same for decodes, heads that share keys as rows of one product",
    GatheredSdpaContender.name: "the same per request, over keys gathered from the pages",
    ReadContender.name: "a sum over as many bytes: what reading alone takes",
}


def known_peers() -> list[tuple[str, str, str]]:
    """Return name, description and needs of each direct call; needs say what is here already."""
    own = [(name, words, "torch") for name, words in _TORCH_WORDS.items()]
    vendors = [(peer.name, peer.description, peer.needs()) for peer in VENDOR_PEERS]
    return [*own, *vendors, (_VLLM_CPU, "its op over its own packed cache, on a CPU", _VLLM_CPU)]


def contender_named(name: str) -> Contender:
    """Return a direct call, a function of one's own, or a backend.

    Raises:
        UnknownNameError: the name looks like a direct call's and is none.
        VendorMissingError: the direct call's library is not installed; has the command.
    """
    if name in PEERS:
        return PEERS[name]()
    if ":" in name:
        return FunctionContender(name)
    if "." in name:
        raise UnknownNameError.for_name("peer", name, PEERS)
    return BackendContender(name)
