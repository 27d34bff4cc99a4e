"""A Llama model and its tokenizer read from one GGUF file.

What the keys and tensors mean is defined by llama.cpp: the metadata keys in gguf's constants, the
order of query and key rows in its converter from Hugging Face checkpoints, and the rules by which
text is split before byte-pair encoding in its vocabulary loader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from attn_shared.errors import UnsupportedOptionError

__all__ = ["GGUFLlama"]

OnTensor = Callable[[int, int], None]
"""Called with (tensors read, tensors in all)."""

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_CONTROL_TOKEN = 3  # llama.cpp's token type of markers such as <|im_start|>


class GGUFLlama:
    """The parts of a GGUF file with architecture "llama" and a byte-level BPE vocabulary."""

    def __init__(self, path: Path) -> None:
        """Read the file's metadata; tensors stay on disk.

        Raises:
            UnsupportedOptionError: another architecture or vocabulary.
        """
        from gguf import GGUFReader

        self.path = path
        self._reader = GGUFReader(path)
        self._require("general.architecture", "llama")
        self._require("tokenizer.ggml.model", "gpt2")
        self._require("tokenizer.ggml.pre", "smollm")

    def value(self, key: str) -> Any:
        """Return a metadata value, None where the file has no such key."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _require(self, key: str, expected: str) -> None:
        if self.value(key) != expected:
            raise UnsupportedOptionError(
                f"{self.path.name} has {key}={self.value(key)!r}; only {expected!r} is read."
            )

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return int(self.value("llama.attention.head_count"))

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return int(self.value("llama.attention.head_count_kv"))

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output projection is the embedding table."""
        return all(tensor.name != "output.weight" for tensor in self._reader.tensors)

    def config(self) -> Any:
        """Return the model's `LlamaConfig`."""
        from transformers import LlamaConfig

        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=len(self.value("tokenizer.ggml.tokens")),
            hidden_size=self.value("llama.embedding_length"),
            intermediate_size=self.value("llama.feed_forward_length"),
            num_hidden_layers=self.value("llama.block_count"),
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.value("llama.context_length"),
            rms_norm_eps=self.value("llama.attention.layer_norm_rms_epsilon"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": self.value("llama.rope.freq_base"),
            },
            bos_token_id=self.value("tokenizer.ggml.bos_token_id"),
            eos_token_id=self.value("tokenizer.ggml.eos_token_id"),
            pad_token_id=self.value("tokenizer.ggml.padding_token_id"),
            tie_word_embeddings=self.ties_embeddings,
            dtype="float32",
        )

    def weights(self, on_tensor: OnTensor) -> dict[str, torch.Tensor]:
        """Return the dequantised weights, float32, under their names in `LlamaForCausalLM`.

        Args:
            on_tensor: told after each tensor.
        """
        return dict(self._weights(on_tensor))

    def _weights(self, on_tensor: OnTensor) -> Iterator[tuple[str, torch.Tensor]]:
        from gguf.quants import dequantize

        tensors = self._reader.tensors
        for count, tensor in enumerate(tensors, start=1):
            weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
            if tensor.name.endswith("attn_q.weight"):
                weight = _halves_from_pairs(weight, self.num_heads)
            elif tensor.name.endswith("attn_k.weight"):
                weight = _halves_from_pairs(weight, self.num_kv_heads)
            yield _model_name(tensor.name), weight
            on_tensor(count, len(tensors))

    def tokenizer(self) -> Any:
        """Return the tokenizer, with the file's chat template and left padding."""
        from transformers import PreTrainedTokenizerFast

        tokens: list[str] = self.value("tokenizer.ggml.tokens")
        named = {
            "bos_token": "bos_token_id",
            "eos_token": "eos_token_id",
            "unk_token": "unknown_token_id",
            "pad_token": "padding_token_id",
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=self._byte_level_bpe(tokens),
            chat_template=self.value("tokenizer.chat_template"),
            model_max_length=self.value("llama.context_length"),
            padding_side="left",
            **{name: tokens[self.value(f"tokenizer.ggml.{key}")] for name, key in named.items()},
        )

    def _byte_level_bpe(self, tokens: list[str]) -> Any:
        """Return the encoder: digits stand alone, then GPT-2's splitting, then byte-level BPE."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        merges = [tuple(merge.split(" ")) for merge in self.value("tokenizer.ggml.merges")]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        encoder = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        encoder.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        encoder.decoder = decoders.ByteLevel()
        kinds = self.value("tokenizer.ggml.token_type")
        control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
        encoder.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
        return encoder


def _model_name(name: str) -> str:
    """Return the name that `LlamaForCausalLM` gives to a tensor of the file.

    Raises:
        UnsupportedOptionError: a tensor that a Llama model does not have.
    """
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _BLOCK_TENSOR.fullmatch(name)
    if match is None or match[2] not in _IN_BLOCK:
        raise UnsupportedOptionError(f"tensor {name!r} has no place in a Llama model.")
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"


def _halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the file's order of rows in each head.

    The rotary embedding turns two rows of a head at a time. In the file the two are neighbours
    (2i, 2i + 1); the model has them half a head apart (i, i + D / 2).

    Args:
        weight: (heads * D, hidden).
        num_heads: heads.
    """
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])  # (heads, D / 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(weight.shape)
