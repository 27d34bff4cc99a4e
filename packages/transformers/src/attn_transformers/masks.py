"""What transformers' mask function is told of a forward pass, handed on to the attention function.

transformers describes visibility as a function of indices (causal, sliding, or any mix that a model
makes up) and asks the function registered here to turn it into a mask, once per forward pass and
kind of layer. Backends need no mask but rules: causal or not, a window, which tokens are padding.
So the function recognises the rules that backends know, refuses every other by name, and returns a
tensor that only carries the rules along: it has the shape of a mask and takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.request import Window, window_of
from attn_transformers.tokens import has_gap

__all__ = ["StepMask", "attention_mask", "step_of"]

MaskFunction = Callable[..., Any]
"""(batch, head, query index, key index) -> whether the query sees the key."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMask:
    """The rules of one forward pass, for layers of one kind.

    Indices count a row's tokens with its padding, from the first token that the cache ever saw.

    Attributes:
        is_causal: a query sees no key of a greater index.
        window: visible keys (left, right) beside the query's own.
        query_start: index of the first query.
        query_len: queries per row.
        key_start: index of the first key that layers without a paged cache are handed.
        key_len: such keys per row that exist already.
        handed_len: such keys per row, with those that a preallocated cache has room for.
        is_real: (B, key_len) bool on the host: which keys are no padding; None: all are real.
        has_gap: padding lies between real tokens of a row, be it before the first of these keys.
        memo: what attention functions keep between the layers of this pass.
    """

    is_causal: bool
    window: Window
    query_start: int
    query_len: int
    key_start: int
    key_len: int
    handed_len: int
    is_real: torch.Tensor | None
    has_gap: bool
    memo: dict[Any, Any] = field(default_factory=dict)

    def of_last_queries(self, count: int) -> StepMask:
        """Return the rules for the last `count` queries of each row."""
        start = self.query_start + self.query_len - count
        return replace(self, query_start=start, query_len=count, memo={})


class RulesTensor(torch.Tensor):
    """A mask that carries a `StepMask` in its attribute `step`.

    Moving or copying it keeps the rules, and taking the last queries narrows them (models do that
    to generate, in layers that share other layers' keys). Anything else makes a mask that nobody
    knows the rules of.
    """

    step: StepMask

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on the plain tensors, and keep the rules where it only moves."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _MOVES and result.shape == args[0].shape and result.dtype is torch.bool:
            return carrying(result, args[0].step)
        if func is torch.Tensor.__getitem__ and _keeps_last_queries(args[0], args[1]):
            return carrying(result, args[0].step.of_last_queries(result.shape[2]))
        return result


_MOVES = frozenset(
    {torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.clone, torch.Tensor.detach}
)


def _keeps_last_queries(mask: torch.Tensor, index: object) -> bool:
    """Whether an index is [:, :, -n:, :] with 0 < n <= queries."""
    if not isinstance(index, tuple) or len(index) != 4:
        return False
    whole, chosen = slice(None), index[2]
    if any(index[dim] != whole for dim in (0, 1, 3)) or not isinstance(chosen, slice):
        return False
    is_tail = chosen.stop is None and chosen.step is None and isinstance(chosen.start, int)
    return is_tail and -mask.shape[2] <= chosen.start < 0


def carrying(mask: torch.Tensor, step: StepMask) -> RulesTensor:
    """Return a view of a mask that carries rules."""
    rules: RulesTensor = mask.as_subclass(RulesTensor)
    rules.step = step
    return rules


def step_of(mask: object) -> StepMask:
    """Return the rules that a mask of `attention_mask` carries.

    Raises:
        UnsupportedOptionError: it carries none: another made it.
    """
    if isinstance(mask, RulesTensor):
        return mask.step
    shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else ""
    raise UnsupportedOptionError(
        f"attention_mask {type(mask).__name__} {shape} was not made by attn's mask function: "
        "backends take rules, not prepared or changed masks.",
        hint="pass a 2D padding mask (batch, tokens) to the model, or use "
        'attn_implementation="sdpa" for it.',
    )


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_hints: Any,
) -> torch.Tensor:
    """Return a mask that carries the rules of a forward pass; see `step_of`.

    The signature is transformers' (AttentionMaskInterface).

    Args:
        batch_size: rows (B).
        q_length: queries per row.
        kv_length: keys per row that the cache hands out.
        q_offset: index of the first query.
        kv_offset: index of the first such key.
        mask_function: what is visible, padding aside; None is causal.
        attention_mask: (B, tokens) bool, False for padding.
        local_size: the window of a sliding mask, the chunk of a chunked one.
        use_vmap: the model changed the mask by functions of its own.
        device: of the model.

    Raises:
        UnsupportedOptionError: a rule that backends do not know.
    """
    is_causal, window = _recognise(mask_function, local_size, is_custom=use_vmap)
    query_start = int(q_offset)
    key_len = kv_length
    if is_causal:  # a preallocated cache hands out slots of tokens that are yet to come
        key_len = min(kv_length, query_start + q_length - kv_offset)
    is_real = _real_places(attention_mask, batch_size, kv_offset + key_len)
    step = StepMask(
        is_causal=is_causal,
        window=window,
        query_start=query_start,
        query_len=q_length,
        key_start=kv_offset,
        key_len=key_len,
        handed_len=kv_length,
        is_real=None if is_real is None else is_real[:, kv_offset:],
        has_gap=is_real is not None and has_gap(is_real),
    )
    mask = torch.ones((), dtype=torch.bool, device=device)
    return carrying(mask.expand(batch_size, 1, q_length, kv_length), step)


def _real_places(padding: torch.Tensor | None, batch_size: int, length: int) -> torch.Tensor | None:
    """Return which of the first places are real, (B, length) on the host; None: all are.

    transformers gives a padding mask the length of all tokens so far; places past its end are
    padding.
    """
    if padding is None:
        return None
    if padding.ndim != 2 or padding.shape[0] != batch_size:
        raise InvalidInputError.for_argument(
            "attention_mask shape", tuple(padding.shape), f"({batch_size}, tokens)"
        )
    is_real = padding[:, :length].bool().cpu()
    if (missing := length - is_real.shape[1]) > 0:
        is_real = torch.nn.functional.pad(is_real, (0, missing))
    return None if bool(is_real.all()) else is_real


def _recognise(
    function: MaskFunction | None, local_size: int | None, *, is_custom: bool
) -> tuple[bool, Window]:
    """Return (is causal, window) of a mask function.

    A function made by one of transformers' factories is the same as another that the factory makes
    with the same numbers; what each is built of is compared, so that a mix with anything else is
    never mistaken for its known part.
    """
    from transformers import masking_utils as hf

    if function is None or function is hf.causal_mask_function:
        return True, (None, None)
    if function is hf.bidirectional_mask_function:
        return False, (None, None)
    if local_size is not None:
        if _is_same(function, hf.sliding_window_causal_mask_function(local_size)):
            return True, window_of(local_size)
        if _is_same(function, hf.sliding_window_bidirectional_mask_function(local_size)):
            return False, (local_size, local_size)  # |distance| <= size: the ends are inclusive
    raise UnsupportedOptionError(
        f"the model masks attention by {_describe(function, local_size, is_custom=is_custom)}, "
        "which no backend is asked for yet; served: causal, sliding window, bidirectional, and a "
        "2D padding mask on top.",
        hint='use attn_implementation="sdpa" or "eager" for this model or call.',
    )


def _is_same(one: object, other: object) -> bool:
    """Whether two functions have the same code and the same constants bound to it."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_is_same(a, b) for a, b in pairs)
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        if one.__code__ is not other.__code__ or one.__defaults__ != other.__defaults__:
            return False
        return _is_same(_bound(one), _bound(other))
    is_constant = isinstance(one, int | float | str | None) and type(one) is type(other)
    return is_constant and one == other


def _bound(function: FunctionType) -> tuple[object, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())


def _describe(function: MaskFunction, local_size: int | None, *, is_custom: bool) -> str:
    """Name the parts of a mask function for a person."""
    names = sorted(set(_part_names(function)))
    if is_custom:
        names.append("or_mask_function / and_mask_function of the model")
    size = "" if local_size is None else f" (size {local_size})"
    return " & ".join(names) + size


_WORDS = {
    "chunked_overlay": "chunked attention (attention_chunk_size)",
    "blockwise_overlay": "blockwise attention (block_sequence_ids)",
    "packed_sequence_mask_function": "packed sequences (position_ids that start again)",
    "remap_positions_for_packed_sequence": "packed sequences (position_ids that start again)",
    "sliding_window_overlay": "a sliding window",
    "sliding_window_bidirectional_overlay": "a two-sided sliding window",
    "causal_mask_function": "a causal mask",
    "bidirectional_mask_function": "a bidirectional mask",
}
_COMBINERS = frozenset({"and_masks", "or_masks", "add_offsets_to_mask_function"})


def _part_names(function: object) -> list[str]:
    if isinstance(function, tuple):
        return [name for part in function for name in _part_names(part)]
    if not callable(function):
        return []
    made_by = getattr(function, "__qualname__", type(function).__qualname__).split(".<locals>")[0]
    inner: list[str] = []
    if isinstance(function, FunctionType):
        inner = _part_names(_bound(function))
    return inner if made_by in _COMBINERS else [_WORDS.get(made_by, made_by), *inner]
