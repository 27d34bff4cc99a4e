"""EXAMPLE_EAGER: plain causal attention over a paged cache, one request after another.

Slow, and right for all that its capability says. It is here to be read and copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from attn_shared.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
)
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability, DeviceLimit, MultipleOf, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError
from attn_shared.kv_write import gather_rows
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.served import require_batch_served, require_block_table, require_served
from attn_shared.spec import LayerSpec

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = [
    "CAPABILITY",
    "ExampleEagerBackend",
    "ExampleEagerBuilder",
    "ExampleEagerImpl",
    "ExampleEagerMetadata",
]

CAPABILITY = Capability(
    devices=(DeviceLimit(vendor=Vendor.CPU),),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    head_sizes=SizeSet(),
    head_sizes_v=SizeSet(),
    block_sizes=(MultipleOf(1),),
    kv_layouts=(KVCacheLayout.NHD, KVCacheLayout.HND),
    window=Support.YES,
    needs_exact_host_lengths=True,
)
"""What is not named here is not served, and the suite checks that it is refused."""


class ExampleEagerBackend(AttentionBackend):
    """What the registry knows: a name, a capability, and the two classes that do the work."""

    name = "EXAMPLE_EAGER"
    attn_api = ">=1,<2"
    description = "plain attention, request by request: an example to copy"
    auto_priority: ClassVar[int | None] = None  # taken by name only

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what is served: the same on every CPU, since torch alone is needed."""
        return CAPABILITY

    @staticmethod
    def get_impl_cls() -> type[ExampleEagerImpl]:
        """Return the class that runs one layer."""
        return ExampleEagerImpl

    @staticmethod
    def get_builder_cls() -> type[ExampleEagerBuilder]:
        """Return the class that prepares each step."""
        return ExampleEagerBuilder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExampleEagerMetadata:
    """One step, as `forward` needs it.

    Attributes:
        requests: query rows and number of keys of each request.
        block_table: (B, M) int32.
    """

    requests: tuple[tuple[slice, int], ...]
    block_table: Tensor

    @property
    def num_tokens(self) -> int:
        """Query rows that belong to requests."""
        return int(self.requests[-1][0].stop) if self.requests else 0


class ExampleEagerBuilder(AttentionMetadataBuilder[ExampleEagerMetadata]):
    """Turns a batch into slices, once per step; this is where the host may be looked at."""

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> ExampleEagerMetadata:
        """Return the step's slices; see `AttentionMetadataBuilder.build`.

        Raises:
            UnsupportedOptionError: the batch asks for what the capability does not name.
            MetadataError: the host's lengths are missing or upper bounds, there is no block table,
                or the prefix is not one that all requests share.
        """
        name = ExampleEagerBackend.name
        for layer in self.layers.values():
            require_batch_served(name, CAPABILITY, layer, common, common_prefix_len)
        starts = common.query_start_loc_cpu.tolist()
        lengths = common.exact_seq_lens_cpu.tolist()
        rows = [slice(*pair) for pair in pairwise(starts)]
        requests = tuple(zip(rows, lengths, strict=True))
        return ExampleEagerMetadata(requests=requests, block_table=require_block_table(common))


class ExampleEagerImpl(AttentionImpl[ExampleEagerMetadata]):
    """Runs one layer. The cache is written by `do_kv_cache_update`, which the base class has."""

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description.

        Raises:
            UnsupportedOptionError: with every reason of the capability.
        """
        super().__init__(spec)
        require_served(ExampleEagerBackend.name, CAPABILITY, spec)
        self.checker = CallChecker(spec, returns_lse=False)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: ExampleEagerMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: sinks, slopes or an LSE, which are not served.
        """
        self.check_metadata(metadata)
        self.checker.check_tensors(query, output, lse, metadata.num_tokens)
        self.checker.check_layer(layer, query.device)
        self.checker.check_written_keys(key, value, query.device)
        kv_cache, cache_spec = self.checker.check_cache(kv_cache, query.device)
        views = cache_spec.split(kv_cache)
        if output is None:
            output = query.new_empty((*query.shape[:2], self.spec.head_size_v))
        for (rows, length), blocks in zip(metadata.requests, metadata.block_table, strict=True):
            keys = gather_rows(views.key, blocks, length)
            values = gather_rows(views.value, blocks, length)
            output[rows] = attend(query[rows], keys, values, self.spec)
        return output

    def check_metadata(self, metadata: ExampleEagerMetadata) -> None:
        """Refuse another backend's metadata, before the step's keys are written."""
        if not isinstance(metadata, ExampleEagerMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "an ExampleEagerMetadata"
            )


def attend(query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec) -> Tensor:
    """Attend within one request.

    Args:
        query: (n, Hq, D), the rows of its last n positions.
        key: (L, Hkv, D), its keys from position 0 on.
        value: (L, Hkv, Dv).
        spec: scale, window and heads.

    Returns:
        float32 (n, Hq, Dv); zeros where there is no key.
    """
    column = torch.arange(len(key))
    row = torch.arange(len(key) - len(query), len(key)).unsqueeze(1)  # bottom-right
    is_hidden = column > row
    left = spec.window[0]
    if left is not None:
        is_hidden |= column < row - left
    grouped = query.float().unflatten(1, (spec.num_kv_heads, spec.queries_per_kv))
    logits = torch.einsum("nkgd,lkd->kgnl", grouped, key.float()) * spec.scale
    weights = logits.masked_fill(is_hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("kgnl,lkd->nkgd", weights, value.float()).flatten(1, 2)
