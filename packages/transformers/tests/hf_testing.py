"""Tiny models with random weights, and what the tests do with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as hf

from attn_transformers import PagedCache

VOCAB = 64
_PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"]


def _llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_PLAIN))


def _mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**_PLAIN, sliding_window=5))


def _gemma2() -> Any:
    config = hf.Gemma2Config(
        **_PLAIN, sliding_window=4, attn_logit_softcapping=0.5, query_pre_attn_scalar=3
    )
    return hf.Gemma2ForCausalLM(config)


def _gpt_oss() -> Any:
    config = hf.GptOssConfig(
        **_PLAIN,
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=_ALTERNATING,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return hf.GptOssForCausalLM(config)


def _gemma4() -> Any:
    config = hf.Gemma4TextConfig(
        **_PLAIN | {"num_hidden_layers": 4},
        sliding_window=4,
        num_kv_shared_layers=2,
        layer_types=_ALTERNATING * 2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        global_head_dim=16,
    )
    return hf.Gemma4ForCausalLM(config)


def _lfm2() -> Any:
    options = {name: value for name, value in _PLAIN.items() if name != "head_dim"}
    return hf.Lfm2ForCausalLM(hf.Lfm2Config(**options, layer_types=["conv", "full_attention"]))


def _deepseek_v2() -> Any:
    options = {name: value for name, value in _PLAIN.items() if name != "head_dim"}
    config = hf.DeepseekV2Config(
        **options | {"num_key_value_heads": 6},
        kv_lora_rank=24,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )
    return hf.DeepseekV2ForCausalLM(config)


def _deepseek() -> Any:
    options = {name: value for name, value in _PLAIN.items() if name != "head_dim"}
    config = hf.DeepseekV3Config(
        **options | {"num_key_value_heads": 6},
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )
    return hf.DeepseekV3ForCausalLM(config)


def _llama4() -> Any:
    config = hf.Llama4TextConfig(
        **_PLAIN,
        attention_chunk_size=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size_mlp=32,
    )
    return hf.Llama4ForCausalLM(config)


def _t5() -> Any:
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=48, d_kv=8, d_ff=32, num_layers=1, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def _bert() -> Any:
    return hf.BertModel(
        hf.BertConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            max_position_embeddings=64,
        )
    )


def _modernbert() -> Any:
    return hf.ModernBertModel(
        hf.ModernBertConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=32,
            max_position_embeddings=64,
            local_attention=6,
            global_attn_every_n_layers=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        )
    )


def _bart() -> Any:
    return hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=VOCAB,
            d_model=48,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        )
    )


def _vit() -> Any:
    return hf.ViTModel(
        hf.ViTConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            image_size=16,
            patch_size=4,
        )
    )


_MAKERS: dict[str, Callable[[], Any]] = {
    "bart": _bart,
    "bert": _bert,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2,
    "gemma2": _gemma2,
    "gemma4": _gemma4,
    "gpt_oss": _gpt_oss,
    "lfm2": _lfm2,
    "llama": _llama,
    "llama4": _llama4,
    "mistral": _mistral,
    "modernbert": _modernbert,
    "t5": _t5,
    "vit": _vit,
}


@cache
def tiny(name: str) -> Any:
    """Return a model with weights large enough that attention decides the tokens."""
    torch.manual_seed(0)
    model = _MAKERS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1 or parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def token_ids(batch_size: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random tokens that are no padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch_size, length), generator=generator)


def padding_mask(length: int, *lengths: int, side: str = "left") -> torch.Tensor:
    """Return a (len(lengths), length) mask of rows with so many real tokens each."""
    columns = torch.arange(length)
    sizes = torch.tensor(lengths)[:, None]
    return (columns >= length - sizes if side == "left" else columns < sizes).long()


def greedy(
    model: Any,
    implementation: str,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Return what a model generates with an attention implementation."""
    model.set_attn_implementation(implementation)
    if cache is not None:
        options["cache"] = cache
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(input_ids, eos_token_id=None, **options)


def logits(model: Any, implementation: str, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the logits of one forward pass."""
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        return model(input_ids, **inputs).logits


def paged(**options: Any) -> PagedCache:
    """Return a cache of small blocks, so that tables have several and last ones are partial."""
    return PagedCache(**{"block_size": 4, **options})
