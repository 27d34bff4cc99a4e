"""What one layer of a model needs, of all ranks together: attention, or a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attn_shared.dtypes import dtype_name
from attn_shared.errors import InvalidRequestError
from attn_shared.kv_cache import MambaSpec
from attn_shared.request import AttentionRequest, AttentionType, MLADims, window_of

__all__ = ["AttentionNeeds", "LayerNeeds", "PlacedLayer", "RecurrentNeeds", "RecurrentState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """One attention layer of a model, before it is divided among ranks.

    Attributes:
        num_heads, num_kv_heads: of all ranks; for latent attention one kv head.
        head_size: width of query and key heads.
        window: keys of a sliding window, the query's own included.
        window_sides: a window given by its sides (left, right) instead.
        chunk_size: chunked local attention.
        softcap: cap on the logits.
        has_sinks: one extra logit per head.
        has_alibi: a linear bias per head.
        attn_type: who attends to what.
        use_mm_prefix: ranges of image tokens see each other in both directions.
        mla: widths of latent attention.
        index_topk: keys that an indexer selects; None is no indexer.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    window_sides: tuple[int, int] | None = None
    chunk_size: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    use_mm_prefix: bool = False
    mla: MLADims | None = None
    index_topk: int | None = None

    def request(self, tp_size: int, options: dict[str, Any]) -> AttentionRequest:
        """Return the request of one of `tp_size` ranks.

        Raises:
            InvalidRequestError: the heads do not divide among the ranks, or an option is odd.
        """
        is_causal = self.attn_type is AttentionType.DECODER
        return AttentionRequest.for_rank(
            total_num_heads=self.num_heads,
            total_num_kv_heads=self.num_kv_heads,
            tp_size=tp_size,
            head_size=self.head_size,
            window=self.window_sides or window_of(self.window, causal=is_causal),
            chunk_size=self.chunk_size,
            softcap=self.softcap,
            has_sinks=self.has_sinks,
            has_alibi=self.has_alibi,
            attn_type=self.attn_type,
            use_mm_prefix=self.use_mm_prefix,
            mla=self.mla,
            use_sparse=self.index_topk is not None,
            index_topk=self.index_topk,
            **options,
        )

    @property
    def label(self) -> str:
        """What a reader calls such a layer."""
        if self.attn_type is AttentionType.ENCODER_DECODER:
            return "cross attention"
        place = "" if self.attn_type is AttentionType.DECODER else "encoder, "
        if self.mla is not None:
            return "latent attention" if self.index_topk is None else "sparse latent attention"
        if self.chunk_size is not None:
            return f"{place}chunks of {self.chunk_size}"
        if self.window_sides is not None:
            return f"{place}window {self.window_sides[0]}+1+{self.window_sides[1]}"
        return f"{place}{'full attention' if self.window is None else f'window of {self.window}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """What one recurrent layer keeps per sequence, on one rank.

    Attributes:
        kind: a name of `known_backends.KNOWN_MAMBA_BACKENDS`.
        shapes: of its tensors, for one sequence.
        dtypes: theirs.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def spec(self, block_size: int) -> MambaSpec:
        """Return the cache spec in a pool whose blocks hold `block_size` tokens."""
        return MambaSpec(block_size=block_size, shapes=self.shapes, dtypes=self.dtypes)

    @property
    def num_bytes(self) -> int:
        """Bytes for one sequence."""
        return self.spec(1).page_size_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        return {
            "kind": self.kind,
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": [dtype_name(dtype) for dtype in self.dtypes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentNeeds:
    """One recurrent layer of a model, before it is divided among ranks.

    Attributes:
        kind: a name of `known_backends.KNOWN_MAMBA_BACKENDS`.
        sharded: counts that must divide among ranks, by the key of the config.
        shapes: the tensors' shapes for a number of ranks.
        state_dtype: dtype of the last tensor where the config says one; else the model's.
    """

    kind: str
    sharded: tuple[tuple[str, int], ...]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    state_dtype: torch.dtype | None = None

    def state(self, tp_size: int, dtype: torch.dtype) -> RecurrentState:
        """Return the state of one of `tp_size` ranks.

        Raises:
            InvalidRequestError: a count does not divide among the ranks.
        """
        for name, number in self.sharded:
            if number % tp_size:
                raise InvalidRequestError.for_field(
                    "tp_size", tp_size, f"a divisor of {name}={number}"
                )
        shapes = self.shapes(tp_size)
        plain = (dtype,) * (len(shapes) - 1)
        last = dtype if self.state_dtype is None else self.state_dtype
        return RecurrentState(kind=self.kind, shapes=shapes, dtypes=(*plain, last))

    @property
    def label(self) -> str:
        """What a reader calls such a layer."""
        return f"{self.kind} state"


LayerNeeds = AttentionNeeds | RecurrentNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayer:
    """Where in the model a layer stands.

    Attributes:
        index: its number among the model's layers, or among those of its encoder.
        needs: what it is.
        shares_cache: it reads the cache of an earlier layer and writes none.
    """

    index: int
    needs: LayerNeeds
    shares_cache: bool = False
