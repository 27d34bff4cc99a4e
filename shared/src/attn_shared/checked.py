"""Checked mode: look at the contents of a batch before any kernel does.

Shapes and dtypes are checked whenever a `CommonAttentionMetadata` is made. What its tensors hold is
checked here, on request, since reading them synchronises the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_shared.errors import MetadataError
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec, MLAAttentionSpec
from attn_shared.kv_write import PAD_SLOT_ID, slot_mapping_for
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["blocks_at_most", "blocks_needed", "check_metadata"]


def check_metadata(
    common: CommonAttentionMetadata,
    *,
    spec: KVCacheSpec | None = None,
    num_blocks: int | None = None,
) -> None:
    """Refuse a batch whose contents no kernel may be handed.

    Does nothing while the current stream records a graph, where reading a tensor is not possible.

    Args:
        common: the batch.
        spec: the cache's format; with it the width of the block table is checked, and that each
            slot is where the table has its token; with `num_blocks` every block id that will be
            read and every slot that will be written.
        num_blocks: blocks of the cache.

    Raises:
        MetadataError: names the first entry that does not fit, its value and what is allowed.
    """
    if _is_capturing(common.query_start_loc.device):
        return
    _check_offsets("query_start_loc", common.query_start_loc_cpu)
    if common.key_start_loc_cpu is not None:
        _check_offsets("key_start_loc", common.key_start_loc_cpu)
    _check_mirrors(common)
    _check_max_seq_len(common)
    _check_lengths(common)
    _check_ranges(common)
    block_size = _block_size_of(spec)
    if common.block_table is not None and block_size is not None:
        _check_table(common.block_table.cpu(), _lens_read(common).cpu(), block_size, num_blocks)
    if common.slot_mapping is not None:
        num_slots = None if block_size is None or num_blocks is None else num_blocks * block_size
        _check_slots(common.slot_mapping.cpu(), num_slots)
        if not _has_other_slots(common):
            _check_places(common, common.slot_mapping.cpu(), block_size)


def blocks_needed(common: CommonAttentionMetadata, spec: KVCacheSpec | None) -> int | None:
    """Return how many blocks a cache must have for a batch: its largest block id or slot's, plus 1.

    Synchronises a device. None while a graph is recorded, and for a cache without blocks.

    Args:
        common: the batch.
        spec: the cache's format.

    Raises:
        MetadataError: a block id that is read is negative.
    """
    return _blocks(common, spec, _last_read)


def blocks_at_most(common: CommonAttentionMetadata, spec: KVCacheSpec | None) -> int | None:
    """Return a bound on `blocks_needed` that costs some 15 us on the host.

    It counts entries of the block table that are not read as well, unless one is negative.

    Args:
        common: the batch.
        spec: the cache's format.

    Raises:
        MetadataError: a block id that is read is negative.
    """
    return _blocks(common, spec, _last_named)


def _blocks(
    common: CommonAttentionMetadata,
    spec: KVCacheSpec | None,
    last_of: Callable[[CommonAttentionMetadata, torch.Tensor, int], int],
) -> int | None:
    """Return how many blocks there must be for the last in slots, and in the table by `last_of`."""
    block_size, table = _block_size_of(spec), common.block_table
    if block_size is None or _is_capturing(common.query_start_loc.device):
        return None
    last = -1 if table is None or not table.numel() else last_of(common, table, block_size)
    return 1 + max(last, _last_written(common, block_size))


def _last_read(common: CommonAttentionMetadata, table: torch.Tensor, block_size: int) -> int:
    """Return the last block that is read, -1 for none; refuse a negative one."""
    table = table.cpu()
    is_read = _is_read(table, _lens_read(common).cpu(), block_size)
    _check_ids(table, is_read, None)
    return int(table.masked_fill(~is_read, -1).max())


def _last_named(common: CommonAttentionMetadata, table: torch.Tensor, block_size: int) -> int:
    """Return the last block in the table; where a negative one is too, the last that is read."""
    least, most = map(int, table.aminmax())
    return most if least >= 0 else _last_read(common, table, block_size)


def _last_written(common: CommonAttentionMetadata, block_size: int) -> int:
    """Return the last block that the batch's slots are in, -1 for none."""
    slots = common.slot_mapping
    return -1 if slots is None or not len(slots) else int(slots.max()) // block_size


def _block_size_of(spec: KVCacheSpec | None) -> int | None:
    return spec.block_size if isinstance(spec, AttentionSpec | MLAAttentionSpec) else None


def _has_other_slots(common: CommonAttentionMetadata) -> bool:
    """Whether slots are not those of the query's tokens: the encoder's, or a rank's own."""
    return common.encoder_seq_lens is not None or common.dcp_local_seq_lens is not None


def _is_capturing(device: torch.device) -> bool:
    asks = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def _refuse_where(
    is_bad: torch.Tensor,
    argument: str,
    values: torch.Tensor,
    allowed: str,
    limits: torch.Tensor | None = None,
) -> None:
    """Raise for the first bad entry; `{limit}` in `allowed` stands for its own limit."""
    if not bool(is_bad.any()):
        return
    index = tuple(is_bad.nonzero()[0].tolist())
    limit = None if limits is None else limits[index].item()
    raise MetadataError.for_argument(
        f"{argument}[{', '.join(map(str, index))}]",
        values[index].item(),
        allowed.format(limit=limit),
    )


def _check_offsets(name: str, offsets: torch.Tensor) -> None:
    _refuse_where(offsets[:1] != 0, name, offsets, "0, where the first request begins")
    earlier = torch.cat([offsets[:1], offsets[:-1]])
    _refuse_where(
        offsets < earlier, name, offsets, "at least {limit}, the entry before it", earlier
    )


def _check_mirrors(common: CommonAttentionMetadata) -> None:
    exact = common.seq_lens_cpu_is_exact
    _check_mirror("query_start_loc", common.query_start_loc, common.query_start_loc_cpu)
    _check_mirror("seq_lens", common.seq_lens, common.seq_lens_cpu, may_exceed=not exact)
    _check_mirror("key_start_loc", common.key_start_loc, common.key_start_loc_cpu)
    _check_mirror("encoder_seq_lens", common.encoder_seq_lens, common.encoder_seq_lens_cpu)
    _check_mirror(
        "dcp_local_seq_lens",
        common.dcp_local_seq_lens,
        common.dcp_local_seq_lens_cpu,
        may_exceed=True,
    )
    if isinstance(common.causal, torch.Tensor):
        _check_mirror("causal", common.causal, common.causal_cpu)


def _check_mirror(
    name: str, tensor: torch.Tensor | None, mirror: torch.Tensor | None, *, may_exceed: bool = False
) -> None:
    if tensor is None or mirror is None:
        return
    source = tensor.cpu()
    is_bad = mirror < source if may_exceed else mirror != source
    allowed = f"{'at least ' if may_exceed else ''}{{limit}}, which {name} holds on the device"
    _refuse_where(is_bad, f"{name}_cpu", mirror, allowed, source)


def _check_max_seq_len(common: CommonAttentionMetadata) -> None:
    """Hold the bound to the device's lengths, of which the host may know nothing."""
    lens = common.seq_lens.cpu()
    if len(lens) and common.max_seq_len < int(lens.max()):
        row = int(lens.argmax())
        raise MetadataError.for_argument(
            "max_seq_len",
            common.max_seq_len,
            f"at least {int(lens[row])}, the seq_len of request {row}",
        )


def _check_lengths(common: CommonAttentionMetadata) -> None:
    lens = common.seq_lens.cpu()
    _refuse_where(lens < 0, "seq_lens", lens, ">= 0")
    if common.encoder_seq_lens is not None:
        encoder_lens = common.encoder_seq_lens.cpu()
        _refuse_where(encoder_lens < 0, "encoder_seq_lens", encoder_lens, ">= 0")
    elif common.key_start_loc is None:
        query_lens = common.query_lens_cpu
        allowed = "at least {limit}, the request's query length, or 0 for a padded row"
        _refuse_where((lens > 0) & (lens < query_lens), "seq_lens", lens, allowed, query_lens)
    if common.dcp_local_seq_lens is not None:
        local = common.dcp_local_seq_lens.cpu()
        is_bad = (local < 0) | (local > lens)
        _refuse_where(is_bad, "dcp_local_seq_lens", local, "0 to {limit}, the seq_len", lens)


def _check_ranges(common: CommonAttentionMetadata) -> None:
    lens = common.seq_lens.cpu()
    for request, ranges in common.mm_prefix_ranges.items():
        if not 0 <= request < common.num_reqs:
            raise MetadataError.for_argument(
                "mm_prefix_ranges key", request, f"a request, 0 to {common.num_reqs - 1}"
            )
        for index, (start, end) in enumerate(ranges):
            if not 0 <= start <= end < lens[request]:
                raise MetadataError.for_argument(
                    f"mm_prefix_ranges[{request}][{index}]",
                    (start, end),
                    f"0 <= start <= end < {int(lens[request])}, the seq_len",
                )


def _lens_read(common: CommonAttentionMetadata) -> torch.Tensor:
    """Return (B,): how many keys of each row of the block table are read."""
    if common.encoder_seq_lens is not None:
        return common.encoder_seq_lens
    if common.dcp_local_seq_lens is not None:
        return common.dcp_local_seq_lens
    return common.seq_lens


def _check_table(
    table: torch.Tensor, lens: torch.Tensor, block_size: int, num_blocks: int | None
) -> None:
    width = table.shape[1]
    most = torch.full_like(lens, width * block_size)
    allowed = f"at most {{limit}}: block_table has {width} blocks of {block_size} per row"
    _refuse_where(lens > most, "seq_lens", lens, allowed, most)
    _check_ids(table, _is_read(table, lens, block_size), num_blocks)


def _check_ids(table: torch.Tensor, is_read: torch.Tensor, num_blocks: int | None) -> None:
    if num_blocks is None:
        _refuse_where(is_read & (table < 0), "block_table", table, ">= 0, a block of the cache")
        return
    is_bad = is_read & ((table < 0) | (table >= num_blocks))
    _refuse_where(is_bad, "block_table", table, f"0 to {num_blocks - 1}, a block of the cache")


def _is_read(table: torch.Tensor, lens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return (B, M) bool: which entries of the table hold keys of their request."""
    num_read = (lens + block_size - 1) // block_size
    return torch.arange(table.shape[1]) < num_read.unsqueeze(1)


def _check_places(
    common: CommonAttentionMetadata, slots: torch.Tensor, block_size: int | None
) -> None:
    """Refuse a slot where the table does not look for its token, and one of a padding row."""
    num_tokens = common.num_actual_tokens
    rows = torch.arange(len(slots))
    allowed = f"{PAD_SLOT_ID}: row {{limit}} of query is padding"
    is_bad = (rows >= num_tokens) & (slots != PAD_SLOT_ID)
    _refuse_where(is_bad, "slot_mapping", slots, allowed, rows)
    if common.block_table is None or block_size is None or not common.block_table.shape[1]:
        return
    places = slot_mapping_for(
        common.block_table.cpu(), common.query_start_loc_cpu, common.seq_lens.cpu(), block_size
    )
    slots = slots[:num_tokens]
    allowed = (
        f"{{limit}}, where block_table has the token's position in blocks of {block_size}, "
        f"or {PAD_SLOT_ID} for a token that is not written"
    )
    is_bad = (slots != PAD_SLOT_ID) & (slots != places)
    _refuse_where(is_bad, "slot_mapping", slots, allowed, places)


def _check_slots(slots: torch.Tensor, num_slots: int | None) -> None:
    allowed = f">= 0, or {PAD_SLOT_ID} for a token that is not written"
    is_bad = slots < PAD_SLOT_ID
    if num_slots is not None:
        is_bad |= slots >= num_slots
        allowed = f"0 to {num_slots - 1}, or {PAD_SLOT_ID} for a token that is not written"
    _refuse_where(is_bad, "slot_mapping", slots, allowed)
    written, order = slots.sort(stable=True)
    repeats = torch.zeros_like(slots, dtype=torch.bool)
    repeats[order[1:]] = (written[1:] == written[:-1]) & (written[1:] != PAD_SLOT_ID)
    _refuse_where(repeats, "slot_mapping", slots, "a slot that no earlier token writes")
