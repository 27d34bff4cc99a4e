"""Decodes over latents as AITER reads them, at addresses that captured graphs may hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_rocm._aiter_steps import PromptStep, places_of
from attn_shared.keyless import Keyless, keyless_of
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.served import require_block_table
from attn_shared.spec import BuildConfig
from attn_shared.step_buffers import Buffers, is_captured

__all__ = ["TokenStep", "TokenStepMaker"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStep:
    """Decodes of a step, with the slot of every key: the kernel's pages are single tokens.

    Attributes:
        query_start_loc: (B + 1,) int32.
        max_query_len: host bound.
        key_start_loc: (B + 1,) int32, prefix sums of the lengths, each at least 1: the kernel
            divides by the weights' sum.
        slots: (n,) int32, those of all requests in a row; what follows key_start_loc[-1] is unread.
        last_page_lens: (B,) int32, all 1.
        keyless: requests without keys, whose rows are to be set; None where there are none.
    """

    query_start_loc: Tensor
    max_query_len: int
    key_start_loc: Tensor
    slots: Tensor
    last_page_lens: Tensor
    keyless: Keyless | None = None


class TokenStepMaker:
    """Describes the decodes of a group of layers; nothing waits for the device."""

    def __init__(self, config: BuildConfig, device: torch.device, block_size: int) -> None:
        """Keep what every step needs.

        Args:
            config: bounds of the batches.
            device: where the kernels run.
            block_size: tokens of the cache's blocks.
        """
        self._config, self._device, self._block_size = config, device, block_size
        self._ones = torch.ones(config.max_num_seqs, dtype=torch.int32, device=device)
        self._slots: Tensor | None = None
        self._kept = Buffers(device, is_kept=True)
        self._fresh = Buffers(device, is_kept=False)

    def make(self, common: CommonAttentionMetadata) -> TokenStep:
        """Return the step of some decodes."""
        captures = is_captured(common, self._config)
        buffers = self._kept if captures else self._fresh
        lens, table = common.seq_lens, require_block_table(common)
        keyless = self._keyless(common, buffers, captures=captures)
        if keyless is not None:
            lens, table = lens.clamp(min=1), keyless.table(table)
        places = places_of(
            PromptStep(
                query_start_loc=common.query_start_loc,
                max_query_len=common.max_query_len,
                max_key_len=common.max_seq_len,
                causal=True,
                num_keys=_key_bound(common),
                key_lens=lens,
                block_table=table,
            ),
            self._block_size,
        )
        slots = places.page_indices(self._block_size)
        return TokenStep(
            query_start_loc=common.query_start_loc,
            max_query_len=common.max_query_len,
            key_start_loc=buffers.kept("key starts", places.starts),
            slots=self._held(slots) if captures else slots,
            last_page_lens=self._ones[: common.num_reqs],
            keyless=keyless,
        )

    def _keyless(
        self, common: CommonAttentionMetadata, buffers: Buffers, *, captures: bool
    ) -> Keyless | None:
        """Return requests without keys where there may be some; a captured graph is for any."""
        host = common.seq_lens_cpu
        is_known = host is not None and common.seq_lens_cpu_is_exact and not captures
        if is_known and host is not None and int(host.min()) > 0:
            return None
        return keyless_of(
            common.query_start_loc,
            common.seq_lens,
            num_tokens=common.num_actual_tokens,
            num_columns=1,
            buffers=buffers,
        )

    def _held(self, slots: Tensor) -> Tensor:
        """Return slots where captured graphs read those of every later step."""
        if self._slots is None:
            most = min(self._config.max_num_seqs, max(self._config.capture_sizes))
            self._slots = torch.empty(
                most * self._config.max_model_len, dtype=torch.int32, device=self._device
            )
        return self._slots[: len(slots)].copy_(slots)


def _key_bound(common: CommonAttentionMetadata) -> int:
    """Return a bound of all keys together, one more for each request that may have none."""
    host = common.seq_lens_cpu
    if host is None:
        return common.num_reqs * max(1, common.max_seq_len)
    return int(host.clamp(min=1).sum())
