"""Checked mode: look at the contents of a batch before any kernel does.

Shapes and dtypes are checked whenever a `CommonAttentionMetadata` is made. What its tensors hold is
checked here, on request, since reading them synchronises the device.
"""

from __future__ import annotations

import torch

from attn_shared.errors import MetadataError
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec, MLAAttentionSpec
from attn_shared.kv_write import PAD_SLOT_ID
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["check_metadata"]


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
        spec: the cache's format; with it the width of the block table is checked, and with
            `num_blocks` every block id that will be read and every slot that will be written.
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
    _check_counts(common)
    _check_lengths(common)
    _check_ranges(common)
    block_size = spec.block_size if isinstance(spec, AttentionSpec | MLAAttentionSpec) else None
    if common.block_table is not None and block_size is not None:
        _check_table(common.block_table.cpu(), _lens_read(common).cpu(), block_size, num_blocks)
    if common.slot_mapping is not None:
        num_slots = None if block_size is None or num_blocks is None else num_blocks * block_size
        _check_slots(common.slot_mapping.cpu(), num_slots)


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


def _check_counts(common: CommonAttentionMetadata) -> None:
    num_tokens = int(common.query_start_loc_cpu[-1])
    if common.num_actual_tokens != num_tokens:
        raise MetadataError.for_argument(
            "num_actual_tokens", common.num_actual_tokens, f"query_start_loc[-1] = {num_tokens}"
        )
    _check_bound("max_query_len", common.max_query_len, common.query_lens_cpu, "query length")
    _check_bound("max_seq_len", common.max_seq_len, common.seq_lens.cpu(), "seq_len")
    is_cross = common.encoder_seq_lens is not None
    for name in ("slot_mapping", "positions"):
        tensor = getattr(common, name)
        if tensor is not None and len(tensor) < num_tokens and not (is_cross and name[0] == "s"):
            raise MetadataError.for_argument(
                f"{name} length", len(tensor), f"at least {num_tokens}, one per query token"
            )


def _check_bound(name: str, bound: int, lens: torch.Tensor, noun: str) -> None:
    if len(lens) and bound < int(lens.max()):
        row = int(lens.argmax())
        raise MetadataError.for_argument(
            name, bound, f"at least {int(lens[row])}, the {noun} of request {row}"
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
    if num_blocks is None:
        return
    num_read = (lens + block_size - 1) // block_size
    is_read = torch.arange(width) < num_read.unsqueeze(1)
    is_bad = is_read & ((table < 0) | (table >= num_blocks))
    _refuse_where(is_bad, "block_table", table, f"0 to {num_blocks - 1}, a block of the cache")


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
