"""What one step of multi-head latent attention is: its decodes, its prefills, their earlier keys.

A batch of an MLA layer has two parts. Its leading rows are decodes, which attend in latent space
(`forward_mqa`); the rest are prefills, which attend with expanded heads (`forward_mha`), first to
the step's own tokens and then, a bounded number of keys at a time, to those of earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from attn_shared.errors import InvalidInputError

if TYPE_CHECKING:
    from attn_shared.mla_prefill import MLAPrefill

__all__ = [
    "ContextChunk",
    "MLAMetadata",
    "MLAPrefillMetadata",
    "MLAQuerySupport",
    "RaggedPart",
    "require_mla_metadata",
]

D = TypeVar("D")
"""A backend's own metadata of the decodes."""


class MLAQuerySupport(StrEnum):
    """Which query lengths the decodes of one call may have."""

    SINGLE = "single"
    """One token each."""
    UNIFORM = "uniform"
    """As many as the others."""
    VARLEN = "varlen"
    """Any number, none included."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedPart:
    """B requests of a prefill: their query rows, and the keys that come with the call.

    Attributes:
        query_start_loc: (B + 1,) int32 on the device: prefix sums of query lengths.
        query_start_loc_cpu: the same on the host.
        key_start_loc: (B + 1,) int32 on the device: prefix sums of key lengths.
        key_start_loc_cpu: the same on the host.
        max_query_len: longest query.
        max_key_len: most keys of a request.
        is_causal: rows see keys up to their own, each request's last row all of them; else all.
        plan: what `MLAPrefill.prepare` made of it.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    key_start_loc: Tensor
    key_start_loc_cpu: Tensor
    max_query_len: int
    max_key_len: int
    is_causal: bool
    plan: Any = None

    @property
    def num_queries(self) -> int:
        """Query rows of all requests."""
        return int(self.query_start_loc_cpu[-1])

    @property
    def num_keys(self) -> int:
        """Keys of all requests."""
        return int(self.key_start_loc_cpu[-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextChunk:
    """Some keys of earlier steps, of requests that stand side by side.

    Attributes:
        rows: the requests' rows among those of the prefills.
        part: those rows and as many keys, without a causal mask: all precede every row.
        slots: (part.num_keys,) int64 on the device: where the cache has the keys; of a cache that
            ranks share, those that this one has.
        exchange: returns all keys' entries from this rank's, where ranks share the cache.
    """

    rows: slice
    part: RaggedPart
    slots: Tensor
    exchange: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAPrefillMetadata:
    """The prefills of one step.

    Attributes:
        kernel: what attends.
        new: the step's own tokens.
        context: the keys of earlier steps, a chunk at a time.
        blind: rows of padded requests, which see no key.
    """

    kernel: MLAPrefill
    new: RaggedPart
    context: tuple[ContextChunk, ...] = ()
    blind: tuple[slice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAMetadata(Generic[D]):
    """One step: query rows [0, num_decode_tokens) are decodes, those up to num_tokens prefills.

    Attributes:
        num_tokens: query rows that belong to requests.
        num_decode_tokens: leading rows that are decodes.
        num_decodes: leading requests that are decodes.
        decode: what the backend made of the decodes; None where there are none.
        prefill: the prefills; None where there are none.
    """

    num_tokens: int
    num_decode_tokens: int
    num_decodes: int
    decode: D | None
    prefill: MLAPrefillMetadata | None = field(default=None)

    @property
    def num_prefill_tokens(self) -> int:
        """Rows that are prefills."""
        return self.num_tokens - self.num_decode_tokens


def require_mla_metadata(metadata: object) -> MLAMetadata[Any]:
    """Return the metadata, after refusing that of another kind of backend.

    Raises:
        InvalidInputError: as said.
    """
    if not isinstance(metadata, MLAMetadata):
        raise InvalidInputError.for_argument(
            "metadata",
            f"a {type(metadata).__name__}",
            "an MLAMetadata, from the builder of an MLA backend",
        )
    return metadata
