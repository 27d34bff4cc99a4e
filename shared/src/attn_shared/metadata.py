"""The per-step description of a batch, shared by all layers and backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from attn_shared.errors import MetadataError
from attn_shared.kv_write import slot_mapping_for

__all__ = ["CommonAttentionMetadata", "MMPrefixRanges"]

MMPrefixRanges = Mapping[int, Sequence[tuple[int, int]]]
"""Request index -> ranges (start, end) of absolute positions, both ends inclusive, whose tokens
see each other in both directions."""

_NO_RANGES: MMPrefixRanges = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonAttentionMetadata:
    """One batch of B requests with T query tokens; what every builder starts from.

    Attributes:
        query_start_loc: (B + 1,) int32 on the device: prefix sums of query lengths.
        query_start_loc_cpu: the same on the host, exact.
        seq_lens: (B,) int32 on the device: keys of each request, this step's included; 0 marks a
            padded row.
        seq_lens_cpu: (B,) int32 on the host, exact or an upper bound, or None.
        seq_lens_cpu_is_exact: which of the two `seq_lens_cpu` is.
        num_reqs: B, padding included.
        num_actual_tokens: T; rows of query past it are padding.
        max_query_len: longest query of the batch.
        max_seq_len: longest sequence, or an upper bound of it.
        block_table: (B, M) int32 on the device, None for cache-free calls; entries past
            ceil(seq_len / block_size) are never read.
        slot_mapping: (T,) int64 on the device, -1 where nothing is written; None if nothing is.
        causal: True, False, or a (B,) bool tensor on the device.
        causal_cpu: host mirror of a causal tensor.
        key_start_loc: (Bk + 1,) int32: prefix sums of key lengths of a cache-free call whose keys
            differ in length from its queries; None: they are equal.
        key_start_loc_cpu: the same on the host.
        encoder_seq_lens: (B,) int32 on the device: keys of each request in cross-attention.
        encoder_seq_lens_cpu: the same on the host.
        is_prefilling: (B,) bool on the host: the prompt is not yet complete; tells a short
            prefill chunk from a decode.
        mm_prefix_ranges: multimodal ranges of absolute positions, by request.
        dcp_local_seq_lens: (B,) int32 on the device: this rank's share of each sequence.
        dcp_local_seq_lens_cpu: the same on the host, exact or an upper bound.
        positions: (T,) int64 on the device, where the caller has them.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    seq_lens_cpu: torch.Tensor | None = None
    seq_lens_cpu_is_exact: bool = True
    block_table: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    causal: bool | torch.Tensor = True
    causal_cpu: torch.Tensor | None = None
    key_start_loc: torch.Tensor | None = None
    key_start_loc_cpu: torch.Tensor | None = None
    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    mm_prefix_ranges: MMPrefixRanges = field(default_factory=lambda: _NO_RANGES)
    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse tensors whose shapes, dtypes or places contradict each other.

        Only shapes are looked at; contents are validated by `attn_shared.checked.check_metadata`.

        Raises:
            MetadataError: names the argument, its value and what is allowed.
        """
        batch = self.num_reqs
        self._check("query_start_loc", self.query_start_loc, torch.int32, (batch + 1,))
        self._check("query_start_loc_cpu", self.query_start_loc_cpu, torch.int32, (batch + 1,))
        self._check("seq_lens", self.seq_lens, torch.int32, (batch,))
        for name in ("seq_lens_cpu", "encoder_seq_lens", "encoder_seq_lens_cpu"):
            self._check(name, getattr(self, name), torch.int32, (batch,))
        for name in ("dcp_local_seq_lens", "dcp_local_seq_lens_cpu"):
            self._check(name, getattr(self, name), torch.int32, (batch,))
        self._check("is_prefilling", self.is_prefilling, torch.bool, (batch,))
        self._check("block_table", self.block_table, torch.int32, (batch, None))
        self._check("slot_mapping", self.slot_mapping, torch.int64, (None,))
        self._check_causal()
        self._check_host_tensors()

    def _check(
        self,
        name: str,
        tensor: torch.Tensor | None,
        dtype: torch.dtype,
        shape: tuple[int | None, ...],
    ) -> None:
        if tensor is None:
            return
        if tensor.dtype is not dtype:
            raise MetadataError.for_argument(f"{name} dtype", tensor.dtype, str(dtype))
        fits = tensor.ndim == len(shape) and all(
            want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            raise MetadataError.for_argument(
                f"{name} shape",
                tuple(tensor.shape),
                f"({', '.join('any' if size is None else str(size) for size in shape)}) "
                f"for num_reqs={self.num_reqs}",
            )

    def _check_causal(self) -> None:
        if isinstance(self.causal, bool):
            return
        self._check("causal", self.causal, torch.bool, (self.num_reqs,))
        self._check("causal_cpu", self.causal_cpu, torch.bool, (self.num_reqs,))
        if self.causal_cpu is None:
            raise MetadataError.for_argument(
                "causal_cpu", None, "the host mirror of a causal tensor, (num_reqs,) bool"
            )

    def _check_host_tensors(self) -> None:
        for name in (
            "query_start_loc_cpu",
            "seq_lens_cpu",
            "causal_cpu",
            "key_start_loc_cpu",
            "encoder_seq_lens_cpu",
            "is_prefilling",
            "dcp_local_seq_lens_cpu",
        ):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device.type != "cpu":
                raise MetadataError.for_argument(
                    f"{name} device", tensor.device, "cpu (a host mirror)"
                )

    @classmethod
    def from_lengths(
        cls,
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor | None = None,
        block_size: int | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> CommonAttentionMetadata:
        """Build the description of a batch from host lengths.

        Args:
            query_lens: query tokens of each request.
            seq_lens: keys of each request, this step's included.
            block_table: (B, M) block ids, None for a cache-free call.
            block_size: tokens per block; with a table it gives the slot mapping.
            device: where the kernels run.
            options: further fields.
        """
        if len(query_lens) != len(seq_lens):
            raise MetadataError.for_argument(
                "seq_lens length", len(seq_lens), f"{len(query_lens)}, one per query length"
            )
        starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        if block_table is not None:
            block_table = block_table.to(device=device, dtype=torch.int32)
            if block_size is not None and "slot_mapping" not in options:
                options["slot_mapping"] = slot_mapping_for(
                    block_table.cpu(), starts, lens, block_size
                ).to(device)
        return cls(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(device),
            seq_lens_cpu=lens,
            num_reqs=len(query_lens),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table=block_table,
            **options,
        )

    @property
    def query_lens_cpu(self) -> torch.Tensor:
        """(B,) int32 on the host: query tokens of each request."""
        return self.query_start_loc_cpu.diff()

    @property
    def exact_seq_lens_cpu(self) -> torch.Tensor:
        """(B,) int32 on the host, exact.

        Raises:
            MetadataError: the host has no lengths, or only an upper bound; fetching the device's
                would synchronise, which is the caller's decision.
        """
        if self.seq_lens_cpu is None or not self.seq_lens_cpu_is_exact:
            state = "missing" if self.seq_lens_cpu is None else "an upper bound"
            raise MetadataError.for_argument(
                "seq_lens_cpu",
                state,
                "exact host lengths for this backend (needs_exact_host_lengths)",
                hint="pass seq_lens_cpu=seq_lens.cpu() or choose a backend without that need.",
            )
        return self.seq_lens_cpu

    def with_fields(self, **changes: Any) -> CommonAttentionMetadata:
        """Return a copy with some fields changed, validated anew."""
        return replace(self, **changes)

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> CommonAttentionMetadata:
        """Return the first `num_actual_reqs` requests and `num_actual_tokens` tokens.

        Every field is sliced, none is dropped.
        """
        changes: dict[str, Any] = {
            "num_reqs": num_actual_reqs,
            "num_actual_tokens": num_actual_tokens,
            "mm_prefix_ranges": {
                request: ranges
                for request, ranges in self.mm_prefix_ranges.items()
                if request < num_actual_reqs
            },
        }
        for name, length in _SLICED_BY.items():
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                size = num_actual_tokens if length == "tokens" else num_actual_reqs
                changes[name] = value[: size + (1 if length == "starts" else 0)]
        return self.with_fields(**changes)


# How each tensor field is cut: by requests, by requests + 1 (prefix sums), or by tokens.
_SLICED_BY = MappingProxyType(
    {
        "query_start_loc": "starts",
        "query_start_loc_cpu": "starts",
        "key_start_loc": "starts",
        "key_start_loc_cpu": "starts",
        "seq_lens": "requests",
        "seq_lens_cpu": "requests",
        "block_table": "requests",
        "causal": "requests",
        "causal_cpu": "requests",
        "encoder_seq_lens": "requests",
        "encoder_seq_lens_cpu": "requests",
        "is_prefilling": "requests",
        "dcp_local_seq_lens": "requests",
        "dcp_local_seq_lens_cpu": "requests",
        "slot_mapping": "tokens",
        "positions": "tokens",
    }
)
