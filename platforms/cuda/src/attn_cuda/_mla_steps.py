"""Decodes as kernels over latents take them, at addresses that captured graphs may hold."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_cuda._mla_step import LatentStep, kernel_table, with_safe_rows
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.served import require_block_table
from attn_shared.spec import BuildConfig
from attn_shared.step_buffers import Buffers, is_captured

__all__ = ["StepMaker"]


class StepMaker:
    """Describes the decodes of a group of layers to one kernel."""

    def __init__(
        self,
        config: BuildConfig,
        device: torch.device,
        *,
        block_size: int,
        page_size: int,
        width_multiple: int = 1,
        loads_keyless: bool = False,
    ) -> None:
        """Keep what every step needs.

        Args:
            config: bounds of the batches.
            device: where the kernels run.
            block_size: tokens of the cache's blocks.
            page_size: tokens of the kernel's pages, a divisor of that.
            width_multiple: what the table's columns have to be a multiple of.
            loads_keyless: the kernel loads a page for a request without keys as well.
        """
        self._config, self._device = config, device
        self._ratio, self._multiple = block_size // page_size, width_multiple
        self._loads_keyless = loads_keyless
        self._buffers = Buffers(device, is_kept=bool(config.capture_sizes))

    def make(self, common: CommonAttentionMetadata) -> LatentStep:
        """Return the step of some decodes; nothing waits for the device."""
        longest = common.max_query_len  # no request has more, so that their sum tells
        is_uniform = common.num_reqs * longest == common.num_actual_tokens
        return LatentStep(
            query_start_loc=common.query_start_loc,
            query_len=longest if is_uniform else 0,
            max_query_len=longest,
            seq_lens=common.seq_lens,
            max_seq_len=max(1, common.max_seq_len),
            block_table=self._table(common),
            num_tokens=common.num_actual_tokens,
        )

    def _table(self, common: CommonAttentionMetadata) -> Tensor:
        """Return the kernel's pages; in a buffer of the graph's where they may be others."""
        given = table = require_block_table(common)
        is_kept = is_captured(common, self._config)
        if self._loads_keyless and _may_be_keyless(common):
            is_other = self._ratio > 1 or given.shape[1] % self._multiple != 0
            room = None if is_other or not is_kept else self._room(common, given)
            table = with_safe_rows(given, common.seq_lens, out=room)
            if room is not None:
                return room
        table = kernel_table(table, self._ratio, width_multiple=self._multiple)
        if not is_kept or (table is given and not self._loads_keyless):
            return table
        return self._room(common, table).copy_(table)

    def _room(self, common: CommonAttentionMetadata, like: Tensor) -> Tensor:
        """Return where a captured size finds its table."""
        name = f"table of {common.num_actual_tokens}"
        return self._buffers.of(name, like.numel(), like.dtype).view(like.shape)


def _may_be_keyless(common: CommonAttentionMetadata) -> bool:
    """Whether a request may have no keys, for all that the host knows."""
    host = common.seq_lens_cpu
    return host is None or not common.seq_lens_cpu_is_exact or int(host.min()) < 1
