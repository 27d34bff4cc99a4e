"""The keyword arguments with which transformers' models call their attention function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from attn_shared.errors import UnsupportedOptionError
from attn_shared.request import Window, window_of
from attn_transformers.masks import StepMask

__all__ = ["Rules", "refuse_unserved", "rules_of"]

_WITHOUT_EFFECT = frozenset(
    {
        "deterministic",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""What models pass through their attention function without meaning it. position_ids belong to
the rotary embedding, which was applied before; positions that start again (packed sequences) reach
the mask function, which refuses them."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "attention_chunk_size": "chunked attention",
        "block_table": "transformers' continuous batching",
        "cache": "transformers' continuous batching",
        "cu_seq_lens_k": "packed sequences",
        "cu_seq_lens_q": "packed sequences",
        "head_mask": "a mask per head",
        "max_length_k": "packed sequences",
        "max_length_q": "packed sequences",
        "output_attentions": "attention weights, which these kernels never hold in memory",
        "position_bias": "a bias added to the logits",
        "read_index": "transformers' continuous batching",
        "seq_idx": "packed sequences",
        "write_index": "transformers' continuous batching",
    }
)


def refuse_unserved(extras: Mapping[str, Any], dropout: float) -> None:
    """Refuse every argument that would change the result and that no backend is asked for.

    Args:
        extras: arguments beyond those that the attention function names; None means not given.
        dropout: probability of dropping an attention weight.

    Raises:
        UnsupportedOptionError: names the argument.
    """
    if dropout:
        raise UnsupportedOptionError(
            f"dropout={dropout} is for training; backends of attn are for inference.",
            hint="call model.eval().",
        )
    for name, value in extras.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name == "output_attentions" and value is False:
            continue
        meaning = _REFUSED.get(name, "unknown to attn, so that it cannot be left out safely")
        raise UnsupportedOptionError(
            f"the model calls its attention with {name}={_short(value)} ({meaning}).",
            hint='use attn_implementation="sdpa" or "eager" for this model or call.',
        )


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Who sees whom: (left, right) of `window` and causality."""

    is_causal: bool
    window: Window


def rules_of(
    module: torch.nn.Module,
    step: StepMask | None,
    *,
    is_causal: bool | None,
    sliding_window: int | None,
    query_len: int,
) -> Rules:
    """Return the rules of a call, from its mask, or without one from its other arguments.

    Without a mask the model's own flag holds, as in transformers' sdpa attention: the argument
    `is_causal`, else the module's attribute, else causal.

    Args:
        module: the attention module.
        step: what the mask carries; None where the model passed no mask.
        is_causal: the argument.
        sliding_window: the argument: keys of the window, the query's own included.
        query_len: queries per row.

    Raises:
        UnsupportedOptionError: the mask and the arguments contradict each other.
    """
    if step is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        return Rules(is_causal=causal, window=window_of(sliding_window, causal=causal))
    if query_len > 1 and is_causal is not None and is_causal != step.is_causal:
        raise UnsupportedOptionError(
            f"is_causal={is_causal} contradicts the model's mask, which "
            f"{'is' if step.is_causal else 'is not'} causal.",
            hint="set config.is_causal, from which transformers builds the mask.",
        )
    if sliding_window is not None and not _agrees(sliding_window, step):
        raise UnsupportedOptionError(
            f"sliding_window={sliding_window} contradicts the model's mask, whose window is "
            f"{step.window} (keys left and right of the query).",
            hint='use attn_implementation="sdpa" for this model.',
        )
    return Rules(is_causal=step.is_causal, window=step.window)


def _agrees(sliding_window: int, step: StepMask) -> bool:
    """Whether the argument means the mask's window.

    A causal window of W keys reaches W - 1 to the left. Models with two-sided windows pass either
    the reach or the reach and one.
    """
    left = step.window[0]
    if step.is_causal:
        return left == sliding_window - 1
    return left is not None and left in (sliding_window - 1, sliding_window)
