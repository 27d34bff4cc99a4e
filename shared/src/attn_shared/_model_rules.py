"""Which kind of layer stands where in a model whose config does not list its layers.

The kinds are the words of `layer_types` in configs of transformers 5; the rules are those of the
configuration classes there (release 5.24).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from attn_shared._model_values import ConfigValues

__all__ = [
    "CHUNKED",
    "FULL",
    "HYBRID",
    "NEITHER",
    "RECURRENT",
    "SLIDING",
    "SYNONYMS",
    "TypeRule",
    "all_full",
    "all_hybrid",
    "all_recurrent",
    "bamba",
    "exaone",
    "full_every",
    "gemma4",
    "jamba",
    "lfm2",
    "llama4",
    "modernbert",
    "nemotron",
    "qwen",
    "sliding_if_any",
    "smollm3",
]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT, HYBRID, NEITHER = "linear_attention", "hybrid", "mlp"

SYNONYMS = MappingProxyType(
    {
        "attention": FULL,
        "indexed_attention": FULL,
        "mamba": RECURRENT,
        "mamba2": RECURRENT,
        "conv": RECURRENT,
        "moe": NEITHER,
    }
)
"""Other words for these kinds, in configs of single families."""

TypeRule = Callable[[ConfigValues, int, int], str]
"""(values, number of the layer, layers) -> kind of the layer."""


def sliding_if_any(values: ConfigValues, layer: int, total: int) -> str:
    """Every layer has the window that the config has."""
    return SLIDING if values.optional_count("sliding_window") else FULL


def qwen(values: ConfigValues, layer: int, total: int) -> str:
    """The layers from `max_window_layers` on have a window, if it is used at all."""
    is_used = values.flag("use_sliding_window") and values.optional_count("sliding_window")
    first = values.optional_count("max_window_layers", least=0)
    return SLIDING if is_used and first is not None and layer >= first else FULL


def full_every(
    period: int, *, key: str = "sliding_window_pattern", other: str = SLIDING
) -> TypeRule:
    """Return the rule by which every `period`-th layer is full; a key of the config may say."""

    def rule(values: ConfigValues, layer: int, total: int) -> str:
        return other if (layer + 1) % values.count(key, default=period) else FULL

    return rule


def gemma4(values: ConfigValues, layer: int, total: int) -> str:
    """Every sixth layer is full, and the last."""
    return FULL if layer == total - 1 or (layer + 1) % 6 == 0 else SLIDING


def exaone(values: ConfigValues, layer: int, total: int) -> str:
    """A period, or a pattern of L and G; the last layer of a pattern is full."""
    if values.optional_count("sliding_window") is None:
        return FULL
    pattern = values.record.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG"):
            raise values.odd("sliding_window_pattern", pattern, "an integer, or L and G in turn")
        is_local = pattern[layer % len(pattern)] == "L"
        return SLIDING if is_local and layer < total - 1 else FULL
    return full_every(4)(values, layer, total)


def smollm3(values: ConfigValues, layer: int, total: int) -> str:
    """Layers without rotary positions have the window, if it is used."""
    if not (values.flag("use_sliding_window") and values.optional_count("sliding_window")):
        return FULL
    return FULL if _has_rope(values, layer) else SLIDING


def llama4(values: ConfigValues, layer: int, total: int) -> str:
    """Layers with rotary positions attend in chunks."""
    is_chunked = values.optional_count("attention_chunk_size") is not None
    return CHUNKED if is_chunked and _has_rope(values, layer) else FULL


def _has_rope(values: ConfigValues, layer: int) -> bool:
    listed = values.record.get("no_rope_layers")
    if isinstance(listed, list) and layer < len(listed):  # an empty one stands for the default
        return bool(listed[layer])
    return (layer + 1) % values.count("no_rope_layer_interval", default=4) != 0


def modernbert(values: ConfigValues, layer: int, total: int) -> str:
    """Every third layer is full, from the first."""
    return SLIDING if layer % values.count("global_attn_every_n_layers", default=3) else FULL


def jamba(values: ConfigValues, layer: int, total: int) -> str:
    """One attention layer in each period."""
    period = values.count("attn_layer_period", default=8)
    offset = values.optional_count("attn_layer_offset", least=0)
    offset = 4 if offset is None else offset
    if offset >= period:
        raise values.odd("attn_layer_offset", offset, f"less than attn_layer_period={period}")
    return FULL if layer % period == offset else RECURRENT


def bamba(values: ConfigValues, layer: int, total: int) -> str:
    """The listed layers attend."""
    indices = values.indices("attn_layer_indices", total) or frozenset()
    return FULL if layer in indices else RECURRENT


def lfm2(values: ConfigValues, layer: int, total: int) -> str:
    """The listed layers attend; all, where none are listed."""
    indices = values.indices("full_attn_idxs", total)
    return FULL if indices is None or layer in indices else RECURRENT


def nemotron(values: ConfigValues, layer: int, total: int) -> str:
    """Read Nemotron-H's pattern: M is a scan, * attention, - and E feed forward."""
    pattern = values.word("hybrid_override_pattern")
    kinds = {"M": RECURRENT, "*": FULL, "-": NEITHER, "E": NEITHER}
    if len(pattern) != total or set(pattern) - set(kinds):
        raise values.odd(
            "hybrid_override_pattern", pattern, f"{total} letters, each one of M * - E"
        )
    return kinds[pattern[layer]]


def all_full(values: ConfigValues, layer: int, total: int) -> str:
    """Every layer is full."""
    return FULL


def all_recurrent(values: ConfigValues, layer: int, total: int) -> str:
    """Every layer is a scan."""
    return RECURRENT


def all_hybrid(values: ConfigValues, layer: int, total: int) -> str:
    """Every layer runs attention and a scan beside each other."""
    return HYBRID
