"""What every vendor's call comes down to, computed by the reference from what was handed over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attn_shared import reference
from attn_shared.errors import AttnError
from attn_shared.quantization import FP8_DTYPES
from attn_shared.reference import AttentionOptions, ReferenceResult

__all__ = ["KernelCall", "LseForm", "NotComputedError"]


class NotComputedError(RuntimeError):
    """The real call knows this argument, and the stub does not compute it.

    A RuntimeError, so that the suite never takes it for a backend's refusal.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LseForm:
    """How a kernel writes its LSE.

    Attributes:
        base: of the logarithm.
        layout: (Hq, T) or (T, Hq).
        keyless: of a row that sees no key (where no sink is in the denominator).
        alibi_by_column: in causal rows without a window the kernel adds slope * j in place of
            -slope * (i - j), so that the LSE of the row at position i comes out slope * i above.
        keyless_astray: with pages the LSE of a request without keys goes to where it would be if
            the tensor were (B, Hq, longest query), be that another's row or past the end.
    """

    base: Literal["e", "2"] = "e"
    layout: Literal["HT", "TH"] = "HT"
    keyless: float = -math.inf
    alibi_by_column: bool = False
    keyless_astray: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelCall:
    """One call in the terms that all of them share.

    Attributes:
        query: (T, Hq, D).
        key: (P, S, Hkv, D) with a block table, else (Tk, Hkv, D).
        value: the same with Dv.
        query_starts: (B + 1,).
        key_lens: (B,).
        key_starts: (B + 1,), without a block table.
        block_table: (B, M), or None.
        scale: of the logits.
        is_causal: bottom-right aligned.
        window: (left, right), None for unbounded.
        softcap: None is off.
        alibi_slopes: (Hq,), or None.
        sinks: (Hq,), or None.
        descales: factors of stored query, key and value: numbers, or (Hkv,).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_starts: Tensor
    key_lens: Tensor
    scale: float
    is_causal: bool
    key_starts: Tensor | None = None
    block_table: Tensor | None = None
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    descales: tuple[float | Tensor, float | Tensor, float | Tensor] = (1.0, 1.0, 1.0)

    @property
    def output_dtype(self) -> torch.dtype:
        """The query's, or bfloat16 where the query is fp8."""
        return torch.bfloat16 if self.query.dtype in FP8_DTYPES else self.query.dtype

    def attend(self) -> ReferenceResult:
        """Return the float64 answer; rows past query_starts[-1] are NaN.

        Raises:
            RuntimeError: lengths or block ids lead outside of the tensors, as a kernel's would.
        """
        try:
            return self._attend()
        except AttnError as error:
            raise RuntimeError(f"an illegal memory access was encountered: {error}") from error

    def _attend(self) -> ReferenceResult:
        query_scale, key_scale, value_scale = self.descales
        query = self.query
        if query.dtype in FP8_DTYPES:
            query = query.double() * _per_query_head(query_scale, query.shape[1])
        if self.block_table is None:
            return self._ragged(query)
        return reference.paged_attention(
            query,
            self.key,
            self.value,
            self._options,
            query_start_loc=self.query_starts,
            seq_lens=self.key_lens,
            block_table=self.block_table,
            causal=self.is_causal,
            k_scale=key_scale,
            v_scale=value_scale,
        )

    def _ragged(self, query: Tensor) -> ReferenceResult:
        if self.key.dtype in FP8_DTYPES:
            raise NotComputedError("fp8 keys without a block table are not computed by the stub")
        return reference.varlen_attention(
            query,
            self.key,
            self.value,
            self._options,
            query_start_loc=self.query_starts,
            key_start_loc=self.key_starts,
            causal=self.is_causal,
        )

    @property
    def _options(self) -> AttentionOptions:
        return AttentionOptions(
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )

    def check_hidden(self, name: str, result: ReferenceResult, logit: float) -> None:
        """Refuse a call whose hidden logits would count, since they are finite before the scale.

        Args:
            name: of the call.
            result: the exact answer.
            logit: what the kernel writes for a hidden one, before it multiplies by the scale.

        Raises:
            NotComputedError: its weight beside a row's keys is more than e^-20.
        """
        lse = result.lse[result.lse.isfinite()]
        if self.softcap is not None or not lse.numel():
            return  # capped logits are hidden by -cap * |logit|
        factor = self.scale * float(torch.as_tensor(self.descales[1]).min())
        least = float(lse.min())
        if logit * factor > least - 20:
            raise NotComputedError(
                f"{name}: hidden logits are {logit * factor:.3g}, and an LSE is {least:.3g}"
            )

    def lse(self, result: ReferenceResult, form: LseForm) -> Tensor:
        """Return the LSE of a result as a kernel writes it, float32."""
        lse = result.lse
        is_by_column = form.alibi_by_column and self.is_causal and self.window[0] is None
        if is_by_column and self.alibi_slopes is not None:
            lse = lse + self.alibi_slopes.double()[:, None] * self._positions(len(lse[0]))[None]
        keyless = lse == -math.inf
        if form.base == "2":
            lse = lse / math.log(2)
        lse = lse.masked_fill(keyless, form.keyless).float()
        if form.keyless_astray and self.block_table is not None:
            lse = self._led_astray(lse, form.keyless)
        return lse if form.layout == "HT" else lse.T.contiguous()

    def _led_astray(self, lse: Tensor, keyless: float) -> Tensor:
        """Return an LSE (Hq, T) in which requests without keys wrote to the wrong places.

        Raises:
            RuntimeError: such a place is past the end.
        """
        astray, num_heads = lse.clone(), len(lse)
        starts, lens = self.query_starts.tolist(), self.query_starts.diff().tolist()
        early = [i for i, n in enumerate(self.key_lens.tolist()) if n <= 0 and lens[i]]
        for index in early:
            astray[:, starts[index] : starts[index + 1]] = 0.0
        for index in early:
            for head in range(num_heads):
                first = (index * num_heads + head) * max(lens)
                if first + lens[index] > astray.numel():
                    raise RuntimeError("an illegal memory access was encountered: LSE")
                astray.view(-1)[first : first + lens[index]] = keyless
        return astray

    def _positions(self, num_rows: int) -> Tensor:
        """Return the absolute position of each row, 0 for padding: float64 (T,)."""
        positions = torch.zeros(num_rows, dtype=torch.float64)
        starts = self.query_starts.tolist()
        for index, length in enumerate(self.key_lens.tolist()):
            start, stop = starts[index], starts[index + 1]
            positions[start:stop] = torch.arange(length - (stop - start), length)
        return positions


def _per_query_head(scale: float | Tensor, num_heads: int) -> float | Tensor:
    """Return a factor that broadcasts to (T, Hq, D): query heads have their kv head's."""
    if not isinstance(scale, Tensor) or scale.ndim == 0:
        return scale
    return scale.double().repeat_interleave(num_heads // len(scale))[:, None]
