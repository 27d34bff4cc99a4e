"""Model families: which kind of layer stands where, and what each kind needs.

A config may list its layers in `layer_types`; where it does not, the family's own rule says which
is which, as the family's published code does. Keys and rules: the configuration classes of
transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from attn_shared import _model_rules as rules
from attn_shared import _model_states as states
from attn_shared._model_layers import AttentionNeeds, PlacedLayer, RecurrentNeeds
from attn_shared._model_rules import CHUNKED, FULL, HYBRID, NEITHER, RECURRENT, SLIDING, TypeRule
from attn_shared._model_values import ConfigValues
from attn_shared.request import AttentionType, MLADims

__all__ = ["FAMILIES", "REFUSED", "TEXT_PARTS", "Family"]

# What an attention layer needs


def _dense(values: ConfigValues, kind: str) -> AttentionNeeds:
    """Return a layer of heads with a head size each, as nearly all decoders have."""
    heads = values.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = values.count("num_key_value_heads", "num_kv_heads", default=heads)
    return AttentionNeeds(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=_head_size(values, heads),
        window=values.count("sliding_window") if kind == SLIDING else None,
        chunk_size=values.count("attention_chunk_size") if kind == CHUNKED else None,
    )


def _head_size(values: ConfigValues, heads: int) -> int:
    given = values.optional_count("head_dim", "attention_head_dim", "kv_channels")
    if given is not None:
        return given
    hidden = values.count("hidden_size", "n_embd", "d_model", "dim")
    if hidden % heads:
        raise values.odd(
            "hidden_size", hidden, f"a multiple of {heads} heads where there is no head_dim"
        )
    return hidden // heads


def _with_sinks(values: ConfigValues, kind: str) -> AttentionNeeds:
    return replace(_dense(values, kind), has_sinks=True)


def _with_alibi(values: ConfigValues, kind: str) -> AttentionNeeds:
    return replace(_dense(values, kind), has_alibi=True)


def _gemma(values: ConfigValues, kind: str) -> AttentionNeeds:
    """Return a layer of Gemma 2 or 3: a cap on the logits, perhaps no causal mask."""
    default_cap = 50.0 if values.word("model_type", "") == "gemma2" else None
    needs = replace(_dense(values, kind), softcap=values.cap("attn_logit_softcapping", default_cap))
    is_bidirectional = values.flag("use_bidirectional_attention")
    return _without_causal_mask(needs) if is_bidirectional else needs


def _without_causal_mask(needs: AttentionNeeds) -> AttentionNeeds:
    """Return the layer as an encoder's; such a config gives a window's two sides together."""
    window = None if needs.window is None else needs.window // 2 + 1
    return replace(needs, attn_type=AttentionType.ENCODER_ONLY, window=window)


def _gemma4(values: ConfigValues, kind: str) -> AttentionNeeds:
    """Return a layer of Gemma 4, whose full layers have heads of a width of their own."""
    needs = _dense(values, kind)
    if values.record.get("use_bidirectional_attention") == "all":
        needs = _without_causal_mask(needs)
    if kind != FULL or values.record.get("per_layer_config") is not None:
        return needs  # a config that lists layers has these widths in the list
    kv_heads = None
    if values.flag("attention_k_eq_v"):
        kv_heads = values.optional_count("num_global_key_value_heads")
    return replace(
        needs,
        head_size=values.count("global_head_dim", default=512),
        num_kv_heads=kv_heads or needs.num_kv_heads,
    )


def _falcon(values: ConfigValues, kind: str) -> AttentionNeeds:
    needs = replace(_dense(values, kind), has_alibi=values.flag("alibi"))
    is_multi_query = values.flag("multi_query", default=True)
    if is_multi_query and not values.flag("new_decoder_architecture"):
        return replace(needs, num_kv_heads=1)
    return needs


def _mpt(values: ConfigValues, kind: str) -> AttentionNeeds:
    inner = values.record.get("attn_config") or {}
    if not isinstance(inner, Mapping):
        raise values.odd("attn_config", inner, "an object")
    own = ConfigValues(inner, "attn_config")
    return replace(_dense(values, kind), has_alibi=own.flag("alibi", default=True))


def _latent(values: ConfigValues, kind: str) -> AttentionNeeds:
    """Return a layer of latent attention (DeepSeek-V2, arXiv 2405.04434), absorbed form."""
    heads = values.count("num_attention_heads")
    mla = MLADims(
        kv_lora_rank=values.count("kv_lora_rank"),
        qk_nope_head_dim=values.count("qk_nope_head_dim"),
        qk_rope_head_dim=values.count("qk_rope_head_dim"),
        v_head_dim=values.optional_count("v_head_dim") or _head_size(values, heads),
        q_lora_rank=values.optional_count("q_lora_rank"),
    )
    return AttentionNeeds(num_heads=heads, num_kv_heads=1, head_size=mla.latent_size, mla=mla)


def _indexed_latent(values: ConfigValues, kind: str) -> AttentionNeeds:
    return replace(_latent(values, kind), index_topk=values.count("index_topk", default=2048))


def _encoder(values: ConfigValues, kind: str) -> AttentionNeeds:
    return replace(_dense(values, kind), attn_type=AttentionType.ENCODER_ONLY)


def _modernbert(values: ConfigValues, kind: str) -> AttentionNeeds:
    """Return a layer of ModernBERT, whose `local_attention` is the sum of a window's two sides."""
    plain = _encoder(values, FULL)
    if kind != SLIDING:
        return plain
    side = values.count("local_attention", default=128) // 2
    return replace(plain, window_sides=(side, side))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read the configs of some model types.

    Attributes:
        layer_type: which kind of layer stands where, if the config does not list them.
        attention: what an attention layer needs, by its kind.
        recurrent: what a recurrent layer needs; None where the family has none.
        layers: all layers, for a model that is not one stack of decoder layers.
    """

    layer_type: TypeRule = rules.all_full
    attention: Callable[[ConfigValues, str], AttentionNeeds] = _dense
    recurrent: Callable[[ConfigValues], RecurrentNeeds] | None = None
    layers: Callable[[ConfigValues], Iterator[PlacedLayer]] | None = None

    def place(self, values: ConfigValues) -> list[PlacedLayer]:
        """Return every layer of the model.

        Raises:
            InvalidInputError: a key is missing or has a value that cannot be.
        """
        found = list(self._stack(values) if self.layers is None else self.layers(values))
        if not found:
            raise values.odd("layer_types", values.record.get("layer_types"), "at least one layer")
        return found

    def _stack(self, values: ConfigValues) -> Iterator[PlacedLayer]:
        kinds = self._kinds(values)
        recurrent = None if self.recurrent is None else self.recurrent(values)
        first_shared = len(kinds) - _num_sharing(values, len(kinds))
        own = values.overrides("per_layer_config", len(kinds))
        for layer, kind in enumerate(kinds):
            if kind in (RECURRENT, HYBRID) and recurrent is not None:
                yield PlacedLayer(index=layer, needs=recurrent)
            if kind not in (RECURRENT, NEITHER):
                needs = self.attention(own.get(layer, values), FULL if kind == HYBRID else kind)
                yield PlacedLayer(index=layer, needs=needs, shares_cache=layer >= first_shared)

    def _kinds(self, values: ConfigValues) -> list[str]:
        total = _num_layers(values)
        listed = values.names("layer_types", total) or values.names("layers_block_type", total)
        if listed is None:
            return [self.layer_type(values, layer, total) for layer in range(total)]
        allowed = {FULL, SLIDING, CHUNKED, HYBRID, NEITHER}
        allowed |= {RECURRENT} if self.recurrent is not None else set()
        kinds = [rules.SYNONYMS.get(name, name) for name in listed]
        for kind in kinds:
            if kind not in allowed:
                raise values.odd("layer_types", kind, ", ".join(sorted(allowed)))
        return kinds


def _num_layers(values: ConfigValues) -> int:
    pattern = values.record.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "num_hidden_layers" not in values.record:
        return len(pattern)
    return values.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _num_sharing(values: ConfigValues, total: int) -> int:
    """Return how many of the last layers read the caches of earlier ones."""
    sharing = values.optional_count("num_kv_shared_layers", least=0) or 0
    if sharing >= total:
        raise values.odd("num_kv_shared_layers", sharing, f"less than the {total} layers")
    return sharing


# Models of two stacks


def _encoder_decoder(values: ConfigValues) -> Iterator[PlacedLayer]:
    """Yield an encoder's layers, then self- and cross-attention of the decoder's."""
    stacks = {
        AttentionType.ENCODER: ("encoder_layers", "encoder_attention_heads"),
        AttentionType.DECODER: ("decoder_layers", "decoder_attention_heads"),
        AttentionType.ENCODER_DECODER: ("decoder_layers", "decoder_attention_heads"),
    }
    for attn_type, (layers_key, heads_key) in stacks.items():
        heads = values.count(heads_key)
        needs = AttentionNeeds(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=_head_size(values, heads),
            attn_type=attn_type,
        )
        for layer in range(values.count(layers_key)):
            yield PlacedLayer(index=layer, needs=needs)


_DENSE = Family()
_WINDOWED = Family(layer_type=rules.sliding_if_any)
_QWEN = Family(layer_type=rules.qwen)
_ENCODER = Family(attention=_encoder)
_ALIBI = Family(attention=_with_alibi)
_LATENT = Family(attention=_latent)
_INDEXED = Family(attention=_indexed_latent)
_TWO_STACKS = Family(layers=_encoder_decoder)
_SCAN = Family(layer_type=rules.all_recurrent, recurrent=states.mamba1)

FAMILIES = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("llama", "olmo", "olmo2", "olmoe", "cohere", "granite", "granitemoe", "glm"),
                *("glm4", "phi", "gpt_neox", "gptj", "opt", "gpt2", "stablelm", "gemma"),
                *("nemotron", "internlm2", "internlm3", "seed_oss", "qwen", "minimax_m2"),
            ),
            _DENSE,
        ),
        **dict.fromkeys(
            ("mistral", "ministral", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2"),
            _WINDOWED,
        ),
        **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), _QWEN),
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"), _QWEN),
        **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), _DENSE),
        "gemma2": Family(layer_type=rules.full_every(2), attention=_gemma),
        "gemma3_text": Family(layer_type=rules.full_every(6), attention=_gemma),
        "gemma3n_text": Family(layer_type=rules.full_every(5)),
        "gemma4_text": Family(layer_type=rules.gemma4, attention=_gemma4),
        "cohere2": Family(layer_type=rules.full_every(4)),
        "olmo3": Family(layer_type=rules.full_every(4)),
        "exaone4": Family(layer_type=rules.exaone),
        "smollm3": Family(layer_type=rules.smollm3),
        "gpt_oss": Family(layer_type=rules.full_every(2), attention=_with_sinks),
        "llama4_text": Family(layer_type=rules.llama4),
        "falcon": Family(attention=_falcon),
        "bloom": _ALIBI,
        "mpt": Family(attention=_mpt),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3"), _LATENT),
        **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _INDEXED),
        **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "distilbert"), _ENCODER),
        "modernbert": Family(layer_type=rules.modernbert, attention=_modernbert),
        **dict.fromkeys(("bart", "mbart", "whisper"), _TWO_STACKS),
        **dict.fromkeys(("mamba", "falcon_mamba"), _SCAN),
        "mamba2": Family(layer_type=rules.all_recurrent, recurrent=states.mamba2),
        "jamba": Family(layer_type=rules.jamba, recurrent=states.mamba1),
        "bamba": Family(layer_type=rules.bamba, recurrent=states.mamba2),
        "granitemoehybrid": Family(layer_type=rules.all_recurrent, recurrent=states.mamba2),
        "nemotron_h": Family(layer_type=rules.nemotron, recurrent=states.nemotron_mamba2),
        "falcon_h1": Family(layer_type=rules.all_hybrid, recurrent=states.mamba2),
        "qwen3_next": Family(
            layer_type=rules.full_every(4, key="full_attention_interval", other=RECURRENT),
            recurrent=states.gated_delta_net,
        ),
        **dict.fromkeys(
            ("lfm2", "lfm2_moe"), Family(layer_type=rules.lfm2, recurrent=states.short_convolution)
        ),
    }
)
"""How to read a config, by its model_type."""

TEXT_PARTS = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "gemma3n": "gemma3n_text",
        "gemma4": "gemma4_text",
        "llama4": "llama4_text",
        "mistral3": "mistral",
        "llava": "llama",
        "llava_next": "llama",
        "idefics3": "llama",
        "smolvlm": "llama",
        "internvl": "qwen2",
        "qwen2_vl": "qwen2_vl_text",
        "qwen2_5_vl": "qwen2_5_vl_text",
        "qwen3_vl": "qwen3_vl_text",
        "qwen3_vl_moe": "qwen3_vl_moe_text",
        "kimi_k25": "deepseek_v3",
    }
)
"""Models of several parts, with the text model that their `text_config` is if it names none."""

_BIAS = "adds a learned bias per distance and head to its logits, which no backend serves"

REFUSED = MappingProxyType(
    {
        **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers"), _BIAS),
        **dict.fromkeys(
            ("deberta", "deberta-v2"), "adds logits of content to position, which no backend serves"
        ),
        "deepseek_v4": "mixes compressed caches and an indexer, which no backend serves yet",
        "rwkv": "has no attention layer and a state of its own kind",
    }
)
"""Model types that are known, and why they cannot be asked about."""
