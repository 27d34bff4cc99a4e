"""The per-step description of a batch, shared by all layers and backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, SupportsIndex

import torch

from attn_shared.errors import MetadataError, UnknownNameError
from attn_shared.kv_write import slot_mapping_for

__all__ = ["CommonAttentionMetadata", "MMPrefixRanges"]

MMPrefixRanges = Mapping[int, Sequence[tuple[int, int]]]
"""Request index -> ranges (start, end) of absolute positions, both ends inclusive, whose tokens
see each other in both directions."""

_INT32_LIMIT = 2**31
_NO_RANGES: MMPrefixRanges = MappingProxyType({})
_DEVICES = "a torch device, such as 'cpu' or 'cuda:0'"


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
            Entries past T belong to padding rows of query and are -1. In cross-attention it has an
            entry per encoder token that is written.
        block_size: tokens per block that the table and slots were made for, where it is known; a
            layer whose cache has another refuses the batch.
        causal: True, False, or a (B,) bool tensor on the device.
        causal_cpu: host mirror of a causal tensor.
        key_start_loc: (B + 1,) int32 on the device: prefix sums of key lengths of a cache-free call
            whose keys differ in length from its queries; None: they are equal.
        key_start_loc_cpu: the same on the host, exact.
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
    block_size: int | None = None
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

        Of contents only the host's counts are looked at, which costs no synchronisation; the rest
        is validated by `attn_shared.checked.check_metadata`.

        Raises:
            MetadataError: names the argument, its value and what is allowed.
        """
        for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise MetadataError.for_argument(name, repr(value), "an integer >= 0")
        for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens"):
            if getattr(self, name) is None:
                raise MetadataError.for_argument(name, None, "a tensor; every batch has one")
        for name, (dtype, axis) in _PER_REQUEST.items():
            if (tensor := getattr(self, name)) is not None:
                self._check(name, tensor, dtype, self.num_reqs + (axis == "starts"))
        self._check("block_table", self.block_table, torch.int32, self.num_reqs, None)
        self._check("slot_mapping", self.slot_mapping, torch.int64, None)
        self._check("positions", self.positions, torch.int64, None)
        self._check_causal()
        self._check_mirrored("key_start_loc")
        self._check_places()
        self._check_counts()
        if self.mm_prefix_ranges is not _NO_RANGES:
            _check_ranges(self.mm_prefix_ranges)

    def _check(
        self,
        name: str,
        tensor: torch.Tensor | None,
        dtype: torch.dtype,
        *shape: int | None,
    ) -> None:
        if tensor is None:
            return
        if not isinstance(tensor, torch.Tensor):
            raise MetadataError.for_argument(name, repr(tensor), f"a tensor of {dtype}")
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
        if not isinstance(self.causal, torch.Tensor):
            raise MetadataError.for_argument(
                "causal", repr(self.causal), "True, False or a (num_reqs,) bool tensor"
            )
        self._check("causal", self.causal, torch.bool, self.num_reqs)
        self._check("causal_cpu", self.causal_cpu, torch.bool, self.num_reqs)
        self._check_mirrored("causal")

    def _check_mirrored(self, name: str) -> None:
        if getattr(self, name) is not None and getattr(self, f"{name}_cpu") is None:
            raise MetadataError.for_argument(
                f"{name}_cpu", None, f"the host mirror of {name}, which builders read"
            )

    def _check_places(self) -> None:
        device = self.query_start_loc.device
        for name in _SLICED_BY:
            tensor = getattr(self, name)
            if not isinstance(tensor, torch.Tensor):
                continue
            if name in _ON_HOST:
                if tensor.device.type != "cpu":
                    raise MetadataError.for_argument(
                        f"{name} device", tensor.device, "cpu (it is read on the host)"
                    )
            elif tensor.device != device:
                raise MetadataError.for_argument(
                    f"{name} device", tensor.device, f"{device}, where query_start_loc is"
                )

    def _check_counts(self) -> None:
        """Hold the counts to what the host knows of the lengths."""
        starts = self.query_start_loc_cpu.tolist()  # a few numbers are faster than tensors' ops
        num_tokens = starts[-1]
        if self.num_actual_tokens != num_tokens:
            raise MetadataError.for_argument(
                "num_actual_tokens", self.num_actual_tokens, f"query_start_loc[-1] = {num_tokens}"
            )
        query_lens = [stop - start for start, stop in pairwise(starts)]
        _check_bound("max_query_len", self.max_query_len, query_lens, "query length")
        if self.seq_lens_cpu is not None and self.seq_lens_cpu_is_exact:
            _check_bound("max_seq_len", self.max_seq_len, self.seq_lens_cpu.tolist(), "seq_len")
        per_token = {"positions": self.positions}
        if self.encoder_seq_lens is None:
            per_token["slot_mapping"] = self.slot_mapping
        for name, tensor in per_token.items():
            if tensor is not None and len(tensor) < num_tokens:
                raise MetadataError.for_argument(
                    f"{name} length", len(tensor), f"at least {num_tokens}, one per query token"
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
            seq_lens: keys of each request, this step's included; 0 marks a padded row, whose
                tokens are not written.
            block_table: (B, M) block ids, None for a cache-free call.
            block_size: tokens per block; with a table it gives the slot mapping, except of
                cross-attention, whose slots belong to encoder tokens.
            device: where the kernels run.
            options: further fields.

        Raises:
            MetadataError: lengths contradict each other or do not fit the table, or there is no
                such device.
            UnknownNameError: an option is no field.
        """
        _check_options(options)
        device = _device_of(device)
        _check_whole("query_lens", query_lens)
        _check_whole("seq_lens", seq_lens)
        if len(query_lens) != len(seq_lens):
            raise MetadataError.for_argument(
                "seq_lens length", len(seq_lens), f"{len(query_lens)}, one per query length"
            )
        starts, num_tokens = _starts_of(query_lens)
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        if block_table is not None:
            _check_ids(block_table)
            block_table = block_table.to(device=device, dtype=torch.int32)
        has_own_slots = "slot_mapping" in options or options.get("encoder_seq_lens") is not None
        if block_size is not None and not has_own_slots:
            table = _check_lengths_fit(query_lens, seq_lens, block_table, block_size)
            slots = slot_mapping_for(table.cpu(), starts, lens, block_size)
            options["slot_mapping"] = slots.to(device)
        return cls(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(device),
            seq_lens_cpu=lens,
            num_reqs=len(query_lens),
            num_actual_tokens=num_tokens,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table=block_table,
            block_size=block_size,
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

        Every field is cut, none is dropped; the slots of cross-attention, which belong to encoder
        tokens, stay whole.

        Raises:
            MetadataError: the batch has fewer requests or tokens.
        """
        _check_at_most("num_actual_tokens", num_actual_tokens, self.num_actual_tokens)
        _check_at_most("num_actual_reqs", num_actual_reqs, self.num_reqs)
        sizes = {
            "tokens": num_actual_tokens,
            "requests": num_actual_reqs,
            "starts": num_actual_reqs + 1,
        }
        changes: dict[str, Any] = {
            "num_reqs": num_actual_reqs,
            "num_actual_tokens": num_actual_tokens,
            "mm_prefix_ranges": {
                request: ranges
                for request, ranges in self.mm_prefix_ranges.items()
                if request < num_actual_reqs
            },
        }
        for name, axis in _SLICED_BY.items():
            value = getattr(self, name)
            is_cross_slots = name == "slot_mapping" and self.encoder_seq_lens is not None
            if isinstance(value, torch.Tensor) and not is_cross_slots:
                changes[name] = value[: sizes[axis]]
        return self.with_fields(**changes)


def _check_at_most(name: str, value: int, limit: int) -> None:
    if not 0 <= value <= limit:
        raise MetadataError.for_argument(name, value, f"0 to {limit}, the size of this batch")


def _check_bound(name: str, bound: int, lens: Sequence[int], noun: str) -> None:
    longest = max(lens, default=0)
    if bound < longest:
        raise MetadataError.for_argument(
            name, bound, f"at least {longest}, the {noun} of request {lens.index(longest)}"
        )


def _starts_of(query_lens: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Return the prefix sums (B + 1,) int32 of lengths, and the last of them."""
    starts = [0, *accumulate(map(int, query_lens))]
    if max(map(abs, starts)) >= _INT32_LIMIT:
        raise MetadataError.for_argument("sum of query_lens", starts[-1], "a 32-bit integer")
    return torch.tensor(starts, dtype=torch.int32), starts[-1]


def _check_ranges(ranges: object) -> None:
    """Refuse what is no mapping of requests to pairs; the pairs themselves are for checked mode."""
    if not isinstance(ranges, Mapping):
        raise MetadataError.for_argument(
            "mm_prefix_ranges", repr(ranges), "a mapping of requests to sequences of (start, end)"
        )
    for request, own in ranges.items():
        name = f"mm_prefix_ranges[{request!r}]"
        if not _is_whole(request):
            raise MetadataError.for_argument(
                "mm_prefix_ranges key", repr(request), "a request, an integer"
            )
        if not isinstance(own, list | tuple):
            raise MetadataError.for_argument(name, repr(own), "a sequence of pairs (start, end)")
        for index, pair in enumerate(own):
            is_pair = isinstance(pair, list | tuple) and len(pair) == 2
            if not is_pair or not all(map(_is_whole, pair)):
                raise MetadataError.for_argument(
                    f"{name}[{index}]",
                    repr(pair),
                    "a pair (start, end) of positions, both integers",
                )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_options(options: Mapping[str, Any]) -> None:
    known = CommonAttentionMetadata.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UnknownNameError.for_name("field of CommonAttentionMetadata", name, list(known))


def _device_of(device: object) -> torch.device:
    try:
        if isinstance(device, str | torch.device):
            return torch.device(device)
    except RuntimeError as error:
        raise MetadataError.for_argument("device", repr(device), _DEVICES) from error
    raise MetadataError.for_argument("device", repr(device), _DEVICES)


def _check_whole(name: str, lens: Sequence[int]) -> None:
    """Refuse lengths that int32 would silently change."""
    if isinstance(lens, str) or not hasattr(lens, "__len__") or not hasattr(lens, "__getitem__"):
        raise MetadataError.for_argument(name, repr(lens), "a sequence of integers")
    for index, length in enumerate(lens):
        is_whole = type(length) is int or isinstance(length, SupportsIndex)  # the latter is slow
        if not is_whole or not -_INT32_LIMIT <= int(length) < _INT32_LIMIT:
            raise MetadataError.for_argument(f"{name}[{index}]", repr(length), "a 32-bit integer")


def _check_ids(table: torch.Tensor) -> None:
    """Refuse a table that int32 would silently change; its contents are read on the host only."""
    if not isinstance(table, torch.Tensor):
        raise MetadataError.for_argument("block_table", repr(table), "a tensor of int32 or int64")
    if not table.numel():
        return
    if table.dtype not in (torch.int32, torch.int64):
        raise MetadataError.for_argument("block_table dtype", table.dtype, "int32 or int64")
    if table.dtype is torch.int32 or table.device.type != "cpu":
        return
    most = int(table.abs().max())
    if most >= _INT32_LIMIT:
        raise MetadataError.for_argument("block_table", most, "block ids of 32 bits")


def _check_lengths_fit(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor | None,
    block_size: int,
) -> torch.Tensor:
    """Return the table, after refusing lengths that give a token a slot outside its row."""
    if block_table is None:
        raise MetadataError.for_argument(
            "block_table", None, f"(B, M) block ids, for block_size={block_size} has no use without"
        )
    if not isinstance(block_size, int) or block_size < 1:
        raise MetadataError.for_argument("block_size", repr(block_size), "an integer >= 1")
    if block_table.ndim != 2 or len(block_table) != len(seq_lens):
        raise MetadataError.for_argument(
            "block_table shape", tuple(block_table.shape), f"({len(seq_lens)}, any)"
        )
    capacity = block_table.shape[1] * block_size
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        is_padded = seq_len == 0 and query_len >= 0
        if not is_padded and not 0 <= query_len <= seq_len <= capacity:
            raise MetadataError.for_argument(
                f"seq_lens[{index}]",
                seq_len,
                f"query_lens[{index}] = {query_len} to {capacity} (the row's "
                f"{block_table.shape[1]} blocks of {block_size}), or 0 for a padded row",
            )
    return block_table


_PER_REQUEST = MappingProxyType(
    {
        "query_start_loc": (torch.int32, "starts"),
        "query_start_loc_cpu": (torch.int32, "starts"),
        "key_start_loc": (torch.int32, "starts"),
        "key_start_loc_cpu": (torch.int32, "starts"),
        "seq_lens": (torch.int32, "requests"),
        "seq_lens_cpu": (torch.int32, "requests"),
        "encoder_seq_lens": (torch.int32, "requests"),
        "encoder_seq_lens_cpu": (torch.int32, "requests"),
        "dcp_local_seq_lens": (torch.int32, "requests"),
        "dcp_local_seq_lens_cpu": (torch.int32, "requests"),
        "is_prefilling": (torch.bool, "requests"),
    }
)
"""Fields of one number per request, with their dtype; prefix sums have one more."""

_SLICED_BY = MappingProxyType(
    {name: axis for name, (_, axis) in _PER_REQUEST.items()}
    | {
        "block_table": "requests",
        "causal": "requests",
        "causal_cpu": "requests",
        "slot_mapping": "tokens",
        "positions": "tokens",
    }
)
"""How each tensor field is cut."""

_ON_HOST = frozenset({name for name in _SLICED_BY if name.endswith("_cpu")} | {"is_prefilling"})
