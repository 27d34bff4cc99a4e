"""What a whole model asks of attention, read from its Hugging Face config.json.

    model = model_layers(load_config("config.json"), tp_size=4)
    for group in model.groups:
        print(group.name, group.layers, group.request)

Nothing but the file is read: no other package, no network. A model's layers fall into groups that
need the same, and each group has one `AttentionRequest` of one tensor-parallel rank, or the shape
of a recurrent state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attn_shared._fields import require_positive
from attn_shared._model_families import FAMILIES, REFUSED, TEXT_PARTS
from attn_shared._model_layers import AttentionNeeds, LayerNeeds, PlacedLayer, RecurrentState
from attn_shared._model_values import ConfigValues, read_json
from attn_shared.dtypes import parse_dtype
from attn_shared.errors import InvalidInputError, UnknownNameError
from attn_shared.request import AttentionRequest

__all__ = [
    "MODEL_TYPES",
    "LayerGroup",
    "ModelLayers",
    "RecurrentState",
    "load_config",
    "model_layers",
]

MODEL_TYPES = tuple(sorted({*FAMILIES, *TEXT_PARTS}))
"""Values of a config's `model_type` that can be read."""

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of a model that need the same.

    Attributes:
        name: what a reader calls them, "window of 4096".
        layers: their numbers, from 0; an encoder's layers are numbered apart.
        request: what one rank asks for each of them; None for a recurrent group.
        state: what one rank keeps per sequence for each of them; None for attention.
        sharing_layers: those of `layers` that read an earlier layer's cache and have none.
    """

    name: str
    layers: tuple[int, ...]
    request: AttentionRequest | None = None
    state: RecurrentState | None = None
    sharing_layers: tuple[int, ...] = ()

    @property
    def num_caches(self) -> int:
        """How many of the layers have a cache or a state of their own."""
        return len(self.layers) - len(self.sharing_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """A model as groups of layers, per tensor-parallel rank.

    Attributes:
        model_type: the config's own word.
        tp_size: ranks that heads are divided among.
        dtype: of query, key, value and output.
        max_model_len: tokens of the longest sequence; None where the config does not say.
        groups: layers that need the same, in the order of their first layers.
        notes: what was assumed, and what was left out.
    """

    model_type: str
    tp_size: int
    dtype: torch.dtype
    max_model_len: int | None
    groups: tuple[LayerGroup, ...]
    notes: tuple[str, ...] = ()

    @property
    def attention_groups(self) -> tuple[LayerGroup, ...]:
        """The groups that a backend is chosen for."""
        return tuple(group for group in self.groups if group.request is not None)


def load_config(path: str | Path) -> dict[str, Any]:
    """Return the object in a config.json.

    Args:
        path: the file, or the folder of a model that holds it.

    Raises:
        InvalidInputError: it cannot be read, or holds no JSON object.
    """
    return read_json(Path(path))


def model_layers(
    config: Mapping[str, Any],
    *,
    tp_size: int = 1,
    dtype: torch.dtype | str | None = None,
    max_model_len: int | None = None,
    **options: Any,
) -> ModelLayers:
    """Return what a model's layers ask for, group by group.

    Args:
        config: the object of a config.json.
        tp_size: ranks that heads are divided among; kv heads are replicated where there are fewer.
        dtype: compute dtype; None takes the config's, and bfloat16 where it has none.
        max_model_len: tokens of the longest sequence; None takes the config's.
        options: fields of `AttentionRequest` that no model decides, for every group:
            kv_cache_dtype, block_size, batch_invariant, phase, ...

    Raises:
        UnknownNameError: nobody knows how to read this `model_type`; lists those that can be read.
        InvalidInputError: a key is missing or has a value that cannot be; names it.
        InvalidRequestError: the heads do not divide among the ranks, or an option or a length is
            odd.
    """
    require_positive("tp_size", tp_size)
    if max_model_len is not None:
        require_positive("max_model_len", max_model_len)
    values, notes = _text_part(config)
    model_type = values.word("model_type")
    chosen = _dtype(values, config, dtype, notes)
    length = max_model_len or values.optional_count(*_LENGTHS)
    placed = [_in_context(layer, config, length, notes) for layer in _placed(model_type, values)]
    groups = _grouped(placed, tp_size, chosen, {**options, "dtype": chosen})
    notes += _replication(placed, tp_size)
    return ModelLayers(
        model_type=str(config["model_type"]),
        tp_size=tp_size,
        dtype=chosen,
        max_model_len=length,
        groups=groups,
        notes=tuple(dict.fromkeys(notes)),
    )


def _text_part(config: Mapping[str, Any]) -> tuple[ConfigValues, list[str]]:
    """Return the values of the text model, with a note where there is more than that."""
    values = ConfigValues(config, "the config")
    if config.get("model_type") is None:
        raise values.missing(("model_type",), ", ".join(MODEL_TYPES))
    model_type = values.word("model_type")
    if model_type in REFUSED:
        raise InvalidInputError.for_argument(
            "model_type in the config",
            f"{model_type!r}, which {REFUSED[model_type]}",
            ", ".join(MODEL_TYPES),
        )
    if model_type not in MODEL_TYPES:
        raise UnknownNameError.for_name("model_type", model_type, MODEL_TYPES)
    inner = config.get("text_config")
    if model_type not in TEXT_PARTS or (inner is None and model_type in FAMILIES):
        return values, []
    if not isinstance(inner, Mapping):
        raise values.missing(("text_config",), "the config of the text model")
    named = inner if inner.get("model_type") is not None else {"model_type": TEXT_PARTS[model_type]}
    text = ConfigValues({**inner, **named}, "text_config")
    if text.word("model_type") not in FAMILIES:
        words = "model_type of text_config"
        raise UnknownNameError.for_name(words, text.word("model_type"), FAMILIES)
    note = f"asked about the text model of {model_type}; its other parts have their own attention"
    return text, [note]


def _placed(model_type: str, values: ConfigValues) -> list[PlacedLayer]:
    return FAMILIES[model_type].place(values)


def _dtype(
    values: ConfigValues,
    config: Mapping[str, Any],
    dtype: torch.dtype | str | None,
    notes: list[str],
) -> torch.dtype:
    given = dtype
    for record in (values.record, config):
        given = given or record.get("dtype") or record.get("torch_dtype")
    if given is None or given == "auto":
        notes.append("the config names no dtype; bfloat16 is assumed")
        return torch.bfloat16
    return parse_dtype(given)


def _in_context(
    layer: PlacedLayer, config: Mapping[str, Any], length: int | None, notes: list[str]
) -> PlacedLayer:
    """Adapt a layer to the whole: image tokens that see each other, windows that hide nothing."""
    needs = layer.needs
    if not isinstance(needs, AttentionNeeds):
        return layer
    if _has_image_ranges(config):
        notes.append("image tokens see each other in both directions (multimodal ranges)")
        needs = replace(needs, use_mm_prefix=True)
    for name in ("window", "chunk_size"):
        size = getattr(needs, name)
        if size is not None and length is not None and size >= length:
            notes.append(f"a {name} of {size} hides nothing in sequences of up to {length} tokens")
            nothing: dict[str, Any] = {name: None}
            needs = replace(needs, **nothing)
    return replace(layer, needs=needs)


def _has_image_ranges(config: Mapping[str, Any]) -> bool:
    """Whether a multimodal model lets the tokens of an image see each other."""
    if config["model_type"] == "gemma3":
        return config.get("vision_config") is not None
    inner = config.get("text_config")
    return isinstance(inner, Mapping) and inner.get("use_bidirectional_attention") == "vision"


def _grouped(
    placed: list[PlacedLayer], tp_size: int, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[LayerGroup, ...]:
    found: dict[LayerNeeds, list[PlacedLayer]] = {}
    for layer in placed:
        found.setdefault(layer.needs, []).append(layer)
    names = _distinct([needs.label for needs in found], list(found))
    return tuple(
        LayerGroup(
            name=name,
            layers=tuple(layer.index for layer in layers),
            sharing_layers=tuple(layer.index for layer in layers if layer.shares_cache),
            request=needs.request(tp_size, options) if isinstance(needs, AttentionNeeds) else None,
            state=None if isinstance(needs, AttentionNeeds) else needs.state(tp_size, dtype),
        )
        for name, (needs, layers) in zip(names, found.items(), strict=True)
    )


def _distinct(names: list[str], needs: list[LayerNeeds]) -> list[str]:
    """Tell groups of one name apart by their head sizes."""
    return [
        f"{name}, head size {need.head_size}"
        if names.count(name) > 1 and isinstance(need, AttentionNeeds)
        else name
        for name, need in zip(names, needs, strict=True)
    ]


def _replication(placed: list[PlacedLayer], tp_size: int) -> list[str]:
    """Say so where a kv head is held by several ranks."""
    counts = {
        layer.needs.num_kv_heads
        for layer in placed
        if isinstance(layer.needs, AttentionNeeds) and layer.needs.mla is None
    }
    return [
        f"{count} kv heads on {tp_size} ranks: each is held by {tp_size // count} of them"
        for count in sorted(counts)
        if count < tp_size
    ]
