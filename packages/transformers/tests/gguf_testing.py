"""A tiny GGUF file with a Llama model and a byte-level vocabulary, as llama.cpp would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS, SIZE, HIDDEN, LAYERS = 4, 2, 8, 32, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> list[str]:
    """Return control tokens, every byte's letter, and one merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*CONTROL, *sorted(ByteLevel.alphabet()), "he", "12"]


def tiny_llama() -> Any:
    """Return the model that the file holds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def file_name(name: str) -> str:
    """Return the file's name of a parameter."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows i and i + D / 2 of each head side by side, as the file has them."""
    half = weight.shape[0] // heads // 2
    rows = [
        h * 2 * half + part * half + i for h in range(heads) for i in range(half) for part in (0, 1)
    ]
    return weight[rows]


def write_gguf(path: Path, *, model: Any = None, pre: str = "smollm", extra: str = "") -> Path:
    """Write the file; `extra` adds a tensor of that name."""
    from gguf import GGUFWriter, TokenType

    model = model or tiny_llama()
    config, tokens = model.config, vocabulary()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    is_control = [token in CONTROL for token in tokens]
    writer.add_token_types([TokenType.CONTROL if c else TokenType.NORMAL for c in is_control])
    writer.add_token_merges(["h e", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if "q_proj" in name or "k_proj" in name:
            weight = neighbours(weight, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(file_name(name), weight.numpy())
    if extra:
        writer.add_tensor(extra, torch.zeros(2, 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
